"""Losses and updates beside those without pads and shared prefixes; some files are commands."""

import benchmarks.ray_and_queue  # noqa: F401  (before verl: it chooses verl's platform)
