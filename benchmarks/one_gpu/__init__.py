"""Exactness and speed on a machine with one GPU and no network: README.md beside this says how to run it."""
