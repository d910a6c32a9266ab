"""Loaded by verl itself (VERL_USE_EXTERNAL_MODULES) where it loads no plug-in: what it needs to run
on a CPU."""

from verl_padding.on_cpu.verl_patches import register

register()
