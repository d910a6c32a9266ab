"""What is known of a verl job: its config, worker calls, modes, metrics, verl's source.

May import: config, errors, pads, plan.
"""
