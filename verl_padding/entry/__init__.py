"""How verl and Hydra find the plug-in, and what is refused there.

May import: errors, local, patches, trainer, verl_job, version.
"""
