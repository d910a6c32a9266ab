"""What a run has left in its folder: rewards, rows, optimizer steps.

May import: errors, pads, plan, stock, verl_job.
"""
