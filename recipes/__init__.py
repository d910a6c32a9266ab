"""Runnable recipes, one folder each.

May import: driver, local, pads, plan, prefix_sharing.
"""
