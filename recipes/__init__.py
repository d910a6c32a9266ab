"""Runnable recipes, one folder each."""
