"""The command ``verl-padding``: one module per subcommand, and what it draws or reads beside it.

May import: config, doctor, driver, errors, job, local, pads, plan, recipes, record, rehearsal, runs, stock, timing,
version.
"""
