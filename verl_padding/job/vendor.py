"""``VERL_ENGINE_VENDOR``, an environment variable of verl's: in the workers of a padded job, it has
verl's registry give them the padded engines (``worker/padded_engine.py``)."""

import os
from typing import Any

VARIABLE = "VERL_ENGINE_VENDOR"
"""The vendor whose engines a process gets, in place of that of its device."""
VENDOR = "verl_padding"
"""Its value in the workers of a padded job, by the config group."""
FOR_WORKERS = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"
"""The setting by which verl hands it to them."""


def check_vendor_reaches_workers(config: Any) -> None:
    """Refuses a job whose workers would have verl's own engines: one with a ``padding`` section
    that is not the config group's. Where Ray runs, they are asked themselves
    (``worker/worker_check.py``)."""
    import ray
    from omegaconf import OmegaConf

    from verl_padding.errors import refuse

    given = (OmegaConf.select(config, FOR_WORKERS), os.environ.get(VARIABLE))
    if VENDOR not in given and not ray.is_initialized():
        why = "the padding section is not the config group's, so workers would not pad"
        fix = f"Add padding: prompt to the defaults list, or set +{FOR_WORKERS}={VENDOR}."
        refuse(f"{FOR_WORKERS}={given[0]}", why, fix)
