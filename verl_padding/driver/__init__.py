"""Runs in the trainer's process: one mixin for verl's three trainers, worker calls, metrics.

May import: config, errors, job, pads, plan, prefix_sharing, record, verl_fixes, worker.
"""
