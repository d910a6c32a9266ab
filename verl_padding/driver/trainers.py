"""The padded trainers. Importing them registers them, by names of their own and as counterparts of verl's trainers."""

import logging
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo import v1

from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.driver.stock_guard import PADDED_TRAINERS, resolve_trainer
from verl_padding.job.modes import COLOCATE_ASYNC, MODE_PREFIX, SEPARATE_ASYNC, SYNC


@v1.register_trainer(MODE_PREFIX + SYNC)
class PaddedTrainerSync(PaddedTrainer, v1.PPOTrainerSync):
    """verl's ``sync`` trainer on batches of any size."""

    extends = SYNC


@v1.register_trainer(MODE_PREFIX + COLOCATE_ASYNC)
class PaddedTrainerColocateAsync(PaddedTrainer, v1.PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer on batches of any size."""

    extends = COLOCATE_ASYNC


@v1.register_trainer(MODE_PREFIX + SEPARATE_ASYNC)
class PaddedTrainerSeparateAsync(PaddedTrainer, v1.PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer on batches of any size."""

    extends = SEPARATE_ASYNC

    def _setup(self) -> None:
        if not self._enable_hybrid_replicas:
            # verl 0.9.1 then logs a line with ``flush=True``, which Python's loggers do not take where they write it.
            logger = logging.getLogger(v1.PPOTrainerSeparateAsync.__module__)
            logger.setLevel(max(logging.WARNING, logger.level))
        super()._setup()


for _padded in (PaddedTrainerSync, PaddedTrainerColocateAsync, PaddedTrainerSeparateAsync):
    PADDED_TRAINERS[_padded.__bases__[1]] = _padded


def padded_trainer(trainer_mode: str) -> type[PaddedTrainer]:
    """The trainer that a job of this ``trainer_mode`` gets if it asks for padding; refused if it pads nothing."""
    return resolve_trainer(v1.get_trainer_cls(trainer_mode))


def trainer_of_mode(config: DictConfig) -> type[Any]:
    """The trainer of a job's mode, padded if the job asks for it: not a user-defined one that extends it."""
    mode = config.trainer.v1.trainer_mode
    return v1.get_trainer_cls(MODE_PREFIX + padded_trainer(mode).extends if asks_for_padding(config) else mode)


def asks_for_padding(config: DictConfig) -> bool:
    """Whether a job has a ``padding`` section, or a padded trainer by name."""
    named = v1.get_trainer_cls(config.trainer.v1.trainer_mode)
    return config.get("padding") is not None or issubclass(named, PaddedTrainer)
