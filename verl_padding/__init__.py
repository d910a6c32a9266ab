"""Exact and balanced training of multi-trajectory agents with verl, on batches of any size."""

__version__ = "0.2.0.dev0"
