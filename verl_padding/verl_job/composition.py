"""A job's config as ``verl.trainer.main_ppo`` composes it, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_padding.verl_job.known_verl import PRIMARY


def compose_job(overrides: Sequence[str], config_name: str = PRIMARY) -> DictConfig:
    """verl's config with Hydra overrides; every interpolation can be resolved, also those of Hydra's own values.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the overrides do not fit the config.
    """
    import verl  # noqa: F401  (loads the plug-in, which puts its groups on Hydra's search path)
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", job_name="main_ppo", version_base=None):
        config = compose(config_name, overrides=list(overrides), return_hydra_config=True)
    with read_write(config), open_dict(config):
        # As Hydra does when it runs a job. Hydra's values refer to each other, and HydraConfig keeps them for the job.
        HydraConfig.instance().set_config(deepcopy(config))
        config.hydra.runtime.output_dir = str(Path(config.hydra.run.dir).absolute())
        HydraConfig.instance().set_config(deepcopy(config))
        del config.hydra
    OmegaConf.to_container(config, resolve=True)  # a copy, only to see that resolving works
    return config
