"""The padded trainers, each the counterpart of one of verl's in a job with a padding section."""

from verl.trainer.ppo import v1

from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.errors import refuse
from verl_padding.job.modes import COLOCATE_ASYNC, MODES, SEPARATE_ASYNC, SYNC


class PaddedTrainerSync(PaddedTrainer, v1.PPOTrainerSync):
    """verl's ``sync`` trainer on batches of any size."""

    extends = SYNC


class PaddedTrainerColocateAsync(PaddedTrainer, v1.PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer on batches of any size."""

    extends = COLOCATE_ASYNC


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
            f"Set trainer.v1.trainer_mode to one of {', '.join(MODES)}, or extend "
            "verl_padding.driver.trainers.PaddedTrainerSync or a sibling.",
        )
    return chosen
