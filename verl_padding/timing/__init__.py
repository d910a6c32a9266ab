"""What micro-batches take by the clock: timings, and their figures.

May import: plan.
"""
