"""What a run leaves in its folder: metrics and rollout dumps, and the curves that they make.

May import: errors, job, pads, plan, record.
"""
