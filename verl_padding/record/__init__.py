"""What a run leaves in its folder: metrics, dumps and recorded steps.

May import: errors, pads, plan.
"""
