"""Rows in TransferQueue: what pads hold, how they come and go, which rows are real.

May import: errors, plan.
"""
