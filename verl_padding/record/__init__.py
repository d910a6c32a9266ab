"""The record of a step: its rows, where each went, what micro-batches took by the clock; and the file of it.

May import: errors, plan, timing.
"""
