"""Hydra configs of the plug-in: the `padding` group, the `local` group and whole-run configs."""
