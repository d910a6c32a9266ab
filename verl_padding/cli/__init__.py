"""The command ``verl-padding``: one module per subcommand, and what it draws or reads beside it.

May import: config, entry, errors, local, pads, plan, recipes, runs, stock, trainer, verl_job.
"""
