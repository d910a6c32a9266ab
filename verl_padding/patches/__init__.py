"""What is replaced in verl, one module each, with its reason.

May import: errors, pads, plan, timing, verl_job.
"""
