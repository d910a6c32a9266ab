"""What a strategy must provide."""

from abc import ABC, abstractmethod
from typing import ClassVar

from verl_padding.plan.calls import StepShape, Update
from verl_padding.plan.errors import PlanError
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.plural import plural
from verl_padding.plan.rows import Rows


class Strategy(ABC):
    """A way to cut the rows of an update into mini-batches, one optimizer step each."""

    has_own_steps: ClassVar[bool] = False
    """Whether it has its own rule for the number of optimizer steps, whatever a job says."""

    def check(self, shape: StepShape, name: str) -> None:
        """Raises a PlanError if the update called ``name`` cannot be cut like this, whatever its
        rows. By default, that is if a fixed number of prompts does not divide into whole
        mini-batches."""
        update, prompts = shape.updates[name], shape.prompts_setting
        size = update.prompts_per_mini_batch
        if shape.optimizer_steps == "configured" and shape.prompts % size:
            raise PlanError(
                f"{update.mini_batch_setting}={size} of {name!r} does not divide "
                f"{prompts}={shape.prompts}: set it to a divisor, or make {prompts} a multiple of "
                f"{size}"
            )

    @abstractmethod
    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        """Cuts the rows (one at least) for the update called ``name``."""

    def describe_steps(self, shape: StepShape, update: Update) -> str:
        """How many optimizer steps an update takes, in words."""
        if self.has_own_steps or shape.optimizer_steps == "by_rows":
            return f"one optimizer step for {plural(shape.mini_batch_rows(update), 'row')}"
        return f"{plural(shape.configured_steps(update), 'optimizer step')} per batch"
