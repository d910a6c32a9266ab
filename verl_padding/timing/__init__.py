"""What micro-batches take by the clock: laps, and their figures.

May import: plan.
"""
