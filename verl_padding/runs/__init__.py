"""What a run leaves in its folder, as it runs and after it: rewards, rows, optimizer steps.

May import: errors, job, pads, plan, stock.
"""
