"""verl's own config, composed by Hydra as ``verl.trainer.main_ppo`` does."""

import verl  # noqa: F401  (loads the plug-in, which puts its configs on Hydra's search path)
from hydra import compose, initialize_config_module
from omegaconf import DictConfig


def compose_job(*overrides: str) -> DictConfig:
    """verl's ``ppo_trainer`` config with overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))
