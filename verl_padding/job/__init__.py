"""What is known of a verl job: what its config says, its worker calls, modes and metrics, the version of verl.

May import: config, errors, pads, plan.
"""
