"""What the config of a verl job says: passes, engines, costs, modes.

May import: config, errors, pads, plan.
"""
