"""Registers the padded trainers with verl, by names of their own and as counterparts of verl's trainers.

Importing this module is all it takes.
"""

import logging
from typing import Any

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
)
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.import_utils import load_extern_type

from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.driver.stock_guard import COUNTERPARTS
from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import COLOCATE_ASYNC, MODE_PREFIX, SEPARATE_ASYNC, SYNC

_log_of_separate_async = logging.getLogger(PPOTrainerSeparateAsync.__module__)


@register_trainer(MODE_PREFIX + SYNC)
class PaddedTrainerSync(PaddedTrainer, PPOTrainerSync):
    """verl's ``sync`` trainer on batches of any size."""

    extends = SYNC


@register_trainer(MODE_PREFIX + COLOCATE_ASYNC)
class PaddedTrainerColocateAsync(PaddedTrainer, PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer on batches of any size."""

    extends = COLOCATE_ASYNC


@register_trainer(MODE_PREFIX + SEPARATE_ASYNC)
class PaddedTrainerSeparateAsync(PaddedTrainer, PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer on batches of any size."""

    extends = SEPARATE_ASYNC

    def _setup(self) -> None:
        if not self._enable_hybrid_replicas:
            # verl 0.9.1 then logs a line with ``flush=True``, which Python's loggers do not take where they write it.
            _log_of_separate_async.setLevel(max(logging.WARNING, _log_of_separate_async.level))
        super()._setup()


for _padded in (PaddedTrainerSync, PaddedTrainerColocateAsync, PaddedTrainerSeparateAsync):
    COUNTERPARTS[_padded.__bases__[1]] = _padded


def padded_trainer(trainer_mode: str) -> type[PaddedTrainer]:
    """The trainer that a job of this ``trainer.v1.trainer_mode`` gets if it asks for padding.

    Raises:
        PaddingConfigError: there is no trainer of this name, or it pads nothing.
    """
    named = _registered(trainer_mode)
    trainer = COUNTERPARTS.get(named, named)
    if not issubclass(trainer, PaddedTrainer):
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: this trainer pads nothing, but padding is set. Make it "
            "extend verl_padding.driver.trainers.PaddedTrainerSync (or one of its siblings), or leave +padding out."
        )
    return trainer


def trainer_without_own_parts(config: DictConfig) -> PPOTrainer:
    """verl's trainer of a job's mode, or its counterpart, without user-defined trainer, checkpoint callback or sampler.

    A sampler is not initialized here: it may ask for TransferQueue, which is not there, or make an actor, which would
    start Ray; verl's constructor only asks whether it has the methods it needs. verl writes into ``config``.
    """
    trainer_class: Any = get_trainer_cls(config.trainer.v1.trainer_mode)
    if asks_for_padding(config):
        trainer_class = _registered(MODE_PREFIX + padded_trainer(config.trainer.v1.trainer_mode).extends)

    class WithoutOwnParts(trainer_class):
        def _build_replay_buffer(self) -> Any:
            own = self.config.trainer.v1.sampler.get("custom_sampler")
            if not (own and own.get("path") and own.get("name")):
                return super()._build_replay_buffer()
            sampler = load_extern_type(own.path, own.name)
            # What a function makes is not known, and taken for one of verl's, which has all methods.
            return object.__new__(sampler if isinstance(sampler, type) else ReplayBufferAsync)

    with open_dict(config):
        config.trainer.checkpoint_callback_class = None
    return WithoutOwnParts(config=config)


def asks_for_padding(config: DictConfig) -> bool:
    """Whether a job has a ``padding`` section, or a padded trainer by name.

    Raises:
        PaddingConfigError: there is no trainer of the name that is configured.
    """
    named = _registered(config.trainer.v1.trainer_mode)
    return config.get("padding") is not None or issubclass(named, PaddedTrainer)


def _registered(trainer_mode: str) -> type:
    try:
        return get_trainer_cls(trainer_mode)
    except ValueError as error:
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: {error} Choose one of these, or register your own in a module "
            "that VERL_USE_EXTERNAL_MODULES names."
        ) from error
