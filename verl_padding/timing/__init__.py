"""What micro-batches take by the clock: laps, the file of a step, metrics and pictures of them.

May import: errors, plan.
"""
