"""The padded trainers. Importing them registers them, by names of their own and as counterparts of
verl's trainers."""

from omegaconf import DictConfig
from verl.trainer.ppo import v1

from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.errors import PaddingConfigError
from verl_padding.job.blocker import refuse
from verl_padding.job.modes import COLOCATE_ASYNC, MODE_PREFIX, SEPARATE_ASYNC, STOCK_MODES, SYNC


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


PADDED_TRAINERS: dict[type, type[PaddedTrainer]] = {
    v1.PPOTrainerSync: PaddedTrainerSync,
    v1.PPOTrainerColocateAsync: PaddedTrainerColocateAsync,
    v1.PPOTrainerSeparateAsync: PaddedTrainerSeparateAsync,
}
"""verl's trainers and the padded ones that take their place."""


def resolve_trainer(trainer: type) -> type[PaddedTrainer]:
    """The trainer that a job with a padding section gets; a PaddingConfigError if it pads
    nothing."""
    chosen = PADDED_TRAINERS.get(trainer, trainer)
    if not issubclass(chosen, PaddedTrainer):
        refuse(
            "padding",
            f"{trainer.__name__} is not a padded trainer and would ignore it",
            f"Choose a trainer.v1.trainer_mode of {', '.join(STOCK_MODES)}, make a trainer of "
            "yours extend verl_padding.driver.trainers.PaddedTrainerSync (or one of its "
            "siblings), or leave +padding out.",
        )
    return chosen


def _named_trainer(trainer_mode: str) -> type:
    try:
        return v1.get_trainer_cls(trainer_mode)
    except ValueError as error:
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: {error} Name the module that registers "
            "yours in VERL_USE_EXTERNAL_MODULES."
        ) from error


def padded_trainer(trainer_mode: str) -> type[PaddedTrainer]:
    """The trainer that a job of this ``trainer_mode`` gets if it asks for padding; refused if it
    pads nothing."""
    return resolve_trainer(_named_trainer(trainer_mode))


def asks_for_padding(config: DictConfig) -> bool:
    """Whether a job has a ``padding`` section, or a padded trainer by name."""
    named = _named_trainer(config.trainer.v1.trainer_mode)
    return config.get("padding") is not None or issubclass(named, PaddedTrainer)
