"""Runnable recipes, one folder each.

May import: driver, on_cpu, plan, prefix_sharing.
"""
