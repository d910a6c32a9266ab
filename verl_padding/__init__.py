"""Exact and balanced training of multi-trajectory agents with verl, on batches of any size."""

from verl_padding.version import __version__ as __version__
