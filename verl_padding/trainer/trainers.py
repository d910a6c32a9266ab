"""Registers the padded trainers with verl, by names of their own and as counterparts of verl's trainers.

Importing this module is all it takes.
"""

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
)

from verl_padding.errors import PaddingConfigError
from verl_padding.patches.stock_guard import COUNTERPARTS
from verl_padding.trainer.mixin import PaddedTrainer
from verl_padding.verl_job.modes import COLOCATE_ASYNC, MODE_PREFIX, SEPARATE_ASYNC, SYNC


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


COUNTERPARTS.update(
    {
        PPOTrainerSync: PaddedTrainerSync,
        PPOTrainerColocateAsync: PaddedTrainerColocateAsync,
        PPOTrainerSeparateAsync: PaddedTrainerSeparateAsync,
    }
)


def padded_trainer(trainer_mode: str) -> type[PaddedTrainer]:
    """The trainer that a job with this ``trainer.v1.trainer_mode`` gets if it asks for padding.

    Returns:
        The trainer of that name, or the counterpart of verl's own.

    Raises:
        PaddingConfigError: there is no trainer of this name, or it pads nothing.
    """
    named = _registered(trainer_mode)
    trainer = COUNTERPARTS.get(named, named)
    if not issubclass(trainer, PaddedTrainer):
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: this trainer pads nothing, but padding is set. Make it "
            "extend verl_padding.trainer.trainers.PaddedTrainerSync (or one of its siblings), or leave +padding out."
        )
    return trainer


def make_trainer(config: DictConfig) -> PPOTrainer:
    """The trainer of a job as ``verl.trainer.main_ppo`` makes it; it has not started anything yet."""
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


def asks_for_padding(config: DictConfig) -> bool:
    """Whether a job has a ``padding`` section, or a padded trainer by name.

    Raises:
        PaddingConfigError: there is no trainer of the name that is configured.
    """
    named = _registered(config.trainer.v1.trainer_mode)
    return config.get("padding") is not None or issubclass(named, PaddedTrainer)


def _registered(trainer_mode: str) -> type:
    try:
        trainer: type = get_trainer_cls(trainer_mode)
    except ValueError as error:
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: {error} Choose one of these, or register your own in a module "
            "that VERL_USE_EXTERNAL_MODULES names."
        ) from error
    return trainer
