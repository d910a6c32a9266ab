"""A job's config as ``verl.trainer.main_ppo`` composes it, without running anything."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

PRIMARY = "ppo_trainer"
"""The config that verl.trainer.main_ppo starts from, unless ``--config-name`` says otherwise."""


def compose_job(overrides: Sequence[str], config_name: str = PRIMARY) -> DictConfig:
    """verl's config with Hydra overrides, every interpolation resolvable.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the overrides do not fit the config.
    """
    import verl  # noqa: F401  (loads the plug-in, which puts its groups on Hydra's search path)
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(config_name, overrides=list(overrides))
    OmegaConf.to_container(config, resolve=True)  # a copy: only to see that it can be done
    return config
