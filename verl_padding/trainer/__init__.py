"""The padded trainers: one mixin over verl's three, worker calls, losses and metrics that know of pads.

May import: config, errors, pads, patches, plan, verl_job.
"""
