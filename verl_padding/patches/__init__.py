"""What is replaced in verl, a module each with its reason.

May import: errors, pads, verl_job.
"""
