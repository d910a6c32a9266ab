"""Registers the padded trainers with verl: importing this module is all it takes."""

from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
)

from verl_padding.errors import PaddingConfigError
from verl_padding.trainer.mixin import PaddedTrainer


@register_trainer("padded_sync")
class PaddedTrainerSync(PaddedTrainer, PPOTrainerSync):
    """verl's ``sync`` trainer on batches of any size."""

    extends = "sync"


@register_trainer("padded_colocate_async")
class PaddedTrainerColocateAsync(PaddedTrainer, PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer on batches of any size."""

    extends = "colocate_async"


@register_trainer("padded_separate_async")
class PaddedTrainerSeparateAsync(PaddedTrainer, PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer on batches of any size."""

    extends = "separate_async"


def is_padded(trainer_mode: str) -> bool:
    """Whether the trainer of this name is a padded one.

    Raises:
        PaddingConfigError: there is no trainer of this name.
    """
    try:
        return issubclass(get_trainer_cls(trainer_mode), PaddedTrainer)
    except ValueError as error:
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: {error} Choose one of these, or register your own in a module "
            "that VERL_USE_EXTERNAL_MODULES names."
        ) from error


def extended_mode(trainer_mode: str) -> str:
    """The verl mode that a registered padded trainer extends, whatever its own name is.

    Raises:
        PaddingConfigError: no trainer of this name, or one that pads nothing.
    """
    if not is_padded(trainer_mode):
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: this trainer pads nothing, and padding is given. Have it "
            "extend verl_padding.trainer.trainers.PaddedTrainerSync (or one of its siblings), or leave +padding out."
        )
    trainer: type[PaddedTrainer] = get_trainer_cls(trainer_mode)
    return trainer.extends
