"""Runnable recipes, one folder each.

May import: local, pads, plan, runs, trainer.
"""
