"""By what verl's registry finds the engines of padded jobs (``worker/padded_engine.py``)."""

VARIABLE = "VERL_ENGINE_VENDOR"
"""verl's environment variable: the vendor whose engines a process gets, in place of that of its
device."""
VENDOR = "verl_padding"
"""Its value in the workers of a padded job, by the config group."""
