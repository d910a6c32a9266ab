"""Repairs of verl 0.9 that are not about pads, each of a fault that is silent or hangs a job.

One module a repair, each with its reason; a test in tests/verl_fixes fails once verl has repaired
it. Only three doors of the plug-in install them: ``driver/stock_guard.py`` (the trainer's process),
``worker/padded_engine.py`` (its workers) and ``entry/import_hooks.py`` (every process).

May import: errors, pads.
"""
