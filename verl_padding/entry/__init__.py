"""How verl and Hydra find the plug-in, and what is refused there.

May import: driver, errors, job, on_cpu, verl_fixes, version, worker.
"""
