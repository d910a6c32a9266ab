"""The command ``verl-padding``: one module per subcommand, and what it draws or reads beside it.

May import: doctor, driver, errors, job, on_cpu, pads, plan, recipes, record, runs, stock,
timing, version.
"""
