"""The record of a step: its rows, where each went, the seconds of micro-batches; and its file.

May import: errors, plan, timing.
"""
