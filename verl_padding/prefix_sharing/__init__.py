"""Tokens that rows begin with alike: found once a step, planned, and computed once in the workers.

May import: errors, pads, plan.
"""
