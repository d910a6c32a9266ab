"""The shape of a training step, as strategies see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_padding.plan.calls import Update


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a strategy cuts mini-batches by: the prompts of a training step, and the calls that train on them."""

    prompts: int
    """Prompts configured for the step; fewer may arrive."""

    sessions_per_prompt: int
    """Rollouts of a prompt."""

    updates: Mapping[str, Update]
    """Training calls by name."""

    row_multiple: int = 1
    """``lcm`` pads the rows to a multiple of this, and of what the updates require."""

    seed: int = 0
    """Seed of the permutations of updates that shuffle."""

    prompts_setting: str = "prompts"
    """Setting of ``prompts``, for messages."""

    sessions_setting: str = "sessions_per_prompt"
    """Setting of ``sessions_per_prompt``, for messages."""

    def optimizer_steps(self, update: Update) -> int:
        """Optimizer steps if all prompts have arrived."""
        return self.prompts // update.prompts_per_mini_batch

    def mini_batch_rows(self, update: Update) -> int:
        """Rows of a mini-batch when every session is one row."""
        return update.prompts_per_mini_batch * self.sessions_per_prompt
