"""What is replaced in verl, one module each, with its reason.

May import: errors, pads, plan, verl_job.
"""
