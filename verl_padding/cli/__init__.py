"""The command ``verl-padding``: one module per subcommand, and what it draws or reads beside it.

May import: config, driver, entry, errors, job, on_cpu, pads, plan, recipes, record, version.
"""
