"""Registers the padded trainers with verl: importing this module is all it takes."""

from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from verl_padding.trainer.mixin import PaddedTrainer


@register_trainer("padded_sync")
class PaddedTrainerSync(PaddedTrainer, PPOTrainerSync):
    """verl's ``sync`` trainer on batches of any size."""


@register_trainer("padded_colocate_async")
class PaddedTrainerColocateAsync(PaddedTrainer, PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer on batches of any size."""


@register_trainer("padded_separate_async")
class PaddedTrainerSeparateAsync(PaddedTrainer, PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer on batches of any size."""
