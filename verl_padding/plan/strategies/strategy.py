"""What a strategy must provide."""

from __future__ import annotations

from abc import ABC, abstractmethod

from verl_padding.plan.calls import Update
from verl_padding.plan.counted import counted
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.rows import Rows
from verl_padding.plan.step_shape import StepShape


class Strategy(ABC):
    """A way to cut the rows of an update into mini-batches, one optimizer step each."""

    @abstractmethod
    def check(self, shape: StepShape, name: str) -> None:
        """
        Raises:
            PlanError: the update called ``name`` cannot be cut like this, whatever rows come.
        """

    @abstractmethod
    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        """Cuts the rows (one at least) for the update called ``name``."""

    def tell_steps(self, shape: StepShape, update: Update) -> str:
        """How many optimizer steps an update takes, in words."""
        return f"{counted(shape.optimizer_steps(update), 'optimizer step')} per batch"
