"""What runs in a worker's process: the losses, and what is replaced in verl, each with its reason.

May import: errors, job, pads, prefix_sharing, verl_fixes.
"""
