"""The command ``verl-padding``: one module per subcommand, and what it draws or reads beside it.

May import: config, doctor, errors, local, pads, plan, recipes, runs, stock, timing, verl_job, version.
"""
