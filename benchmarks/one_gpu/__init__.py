"""Exactness and speed on a machine with one GPU and no network; README.md says how to run it."""
