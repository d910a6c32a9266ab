"""The command ``verl-padding``, a module a command.

May import: entry, errors, local, pads, plan, recipes, runs, stock, trainer, verl_job.
"""
