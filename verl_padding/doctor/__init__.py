"""What can be known of an installation, and of a job, before Ray starts: a module for each kind of thing.

May import: driver, entry, errors, job, plan, rehearsal.
"""
