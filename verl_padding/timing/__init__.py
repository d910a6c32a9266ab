"""What micro-batches take by the clock: laps, and costs that are learned from them.

May import: errors, plan.
"""
