"""Exact, balanced training of multi-trajectory agents on verl: batches of any size, pads that only workers see."""

__version__ = "0.1.0"
