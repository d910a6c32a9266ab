"""Exact, balanced training of multi-trajectory agents on verl: batches of any size, pads no one else sees."""

__version__ = "0.1.0"
