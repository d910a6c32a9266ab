"""Rows in TransferQueue: what pads hold, which rows are real, what workers are told of them.

May import: errors, plan.
"""
