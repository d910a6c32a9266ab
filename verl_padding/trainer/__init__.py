"""The padded trainers: one mixin for verl's three, and worker calls, losses and metrics that know about pads.

May import: config, errors, pads, patches, plan, timing, verl_job.
"""
