"""An agent that finds a number: one row per guess, with a tiny model or a real one."""
