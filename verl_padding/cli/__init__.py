"""The command ``verl-padding``: one module per subcommand.

May import: config, entry, errors, local, pads, plan, recipes, runs, stock, trainer, verl_job.
"""
