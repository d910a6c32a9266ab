"""What is known of a verl job: its config, worker calls, modes, metrics, the version of verl.

May import: config, errors, pads, plan, record.
"""
