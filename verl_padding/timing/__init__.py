"""What micro-batches take by the clock: laps, the file of a step, and costs that are learned from them.

May import: errors, plan.
"""
