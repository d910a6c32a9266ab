"""Runnable recipes, one folder each.

May import: driver, on_cpu, pads, plan, prefix_sharing.
"""
