"""The padded trainers. Importing them registers them, by names of their own and as counterparts of
verl's trainers."""

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


for _padded in (PaddedTrainerSync, PaddedTrainerColocateAsync, PaddedTrainerSeparateAsync):
    PADDED_TRAINERS[_padded.__bases__[1]] = _padded


def padded_trainer(trainer_mode: str) -> type[PaddedTrainer]:
    """The trainer that a job of this ``trainer_mode`` gets if it asks for padding; refused if it
    pads nothing."""
    return resolve_trainer(v1.get_trainer_cls(trainer_mode))


def asks_for_padding(config: DictConfig) -> bool:
    """Whether a job has a ``padding`` section, or a padded trainer by name."""
    named = v1.get_trainer_cls(config.trainer.v1.trainer_mode)
    return config.get("padding") is not None or issubclass(named, PaddedTrainer)
