"""What a run leaves in its folder: metrics, dumps, recorded steps and seconds of micro-batches.

May import: errors, pads, plan.
"""
