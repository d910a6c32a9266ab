"""The strategies: what a mini-batch is made of. To add one, write its class and register it below.

``padding.strategy`` and all messages take their choices from here. A file of that name in
``configs/padding`` makes it a choice of the config group, ``+padding=<name>``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import lcm
from typing import ClassVar

from verl_padding.plan.calls import StepShape, Update
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.errors import PlanError
from verl_padding.plan.mini_batches import (
    MiniBatches,
    cut_evenly,
    even_groups,
    ordered,
    rows_of_prompts,
)
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
    def cut(self, rows: Rows, shape: StepShape, update: Update) -> MiniBatches:
        """Cuts the rows (one at least) for an update."""

    def describe_steps(self, shape: StepShape, update: Update) -> str:
        """How many optimizer steps an update takes, in words."""
        if self.has_own_steps or shape.optimizer_steps == "by_rows":
            return f"one optimizer step for {plural(shape.mini_batch_rows(update), 'row')}"
        return f"{plural(shape.configured_steps(update), 'optimizer step')} per batch"


class Prompt(Strategy):
    """A mini-batch is an even share of the prompts, with all their rows.

    Numbers of prompts differ by at most one, numbers of rows by at most the largest prompt's.
    """

    def cut(self, rows: Rows, shape: StepShape, update: Update) -> MiniBatches:
        steps = shape.steps_of_batch(update, len(rows))
        rows_P = ordered(rows_of_prompts(rows), update, shape.seed)
        groups = even_groups([len(group) for group in rows_P], min(steps, len(rows_P)))
        rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
        # By rows, it is the rule that prompts of many rows take a step each, and no more.
        by_rows = shape.optimizer_steps == "by_rows"
        return MiniBatches(rows_M=rows_M, steps=len(groups) if by_rows else steps)


class EvenRows(Strategy):
    """A mini-batch is an even share of the rows, without regard to prompts.

    Numbers of rows differ by at most one.
    """

    def cut(self, rows: Rows, shape: StepShape, update: Update) -> MiniBatches:
        steps = shape.steps_of_batch(update, len(rows))
        return cut_evenly(ordered(range(len(rows)), update, shape.seed), steps)


def padded_rows(n_rows: int, *sizes: int) -> int:
    """Rows of a batch of ``n_rows`` real ones after padding, by verl 0.9's rule
    (``_get_required_batch_multiple``); ``sizes`` are the data-parallel sizes and the rows per
    mini-batch of all calls that share the batch.

    >>> padded_rows(25, 4, 8, 12)
    48
    """
    return up_to_multiple(n_rows, lcm(*sizes))


class Lcm(Strategy):
    """verl's rule: mini-batches of ppo_mini_batch_size x rollout.n rows, pads among them, as many
    as make up the smallest common multiple that holds the rows.

    25 rows, four ranks, an actor's mini-batches of 8 and a critic's of 12: multiples of lcm(4, 8,
    12) = 24, so 48 rows in every call; six steps of the actor and four of the critic. verl fills
    the last ones with pads alone; here the 25 rows are spread: 5 4 4 4 4 4 and 7 6 6 6. While only
    the critic trains, verl still takes the actor's ranks into the multiple; ``row_multiple`` stands
    for them.
    """

    has_own_steps = True

    def check(self, shape: StepShape, name: str) -> None:
        update = shape.updates[name]
        rows, unit = shape.mini_batch_rows(update), update.dp_size * update.local_batch_multiple
        if rows % unit:
            prompts = f"{update.mini_batch_setting}={update.prompts_per_mini_batch}"
            sessions = f"{shape.sessions_setting}={shape.sessions_per_prompt}"
            raise PlanError(
                f"padding.strategy='lcm': a mini-batch of {name!r} has {prompts} x {sessions} = "
                f"{rows} rows, not a multiple of {unit} ({update.dp_size} data-parallel ranks x "
                f"{update.local_batch_multiple} of a micro-batch); change one or choose another "
                "strategy"
            )

    def cut(self, rows: Rows, shape: StepShape, update: Update) -> MiniBatches:
        updates, size = shape.updates.values(), shape.mini_batch_rows(update)
        sizes = [n for one in updates for n in (one.dp_size, shape.mini_batch_rows(one))]
        total = padded_rows(len(rows), shape.row_multiple, *sizes)
        by_prompt = ordered(rows_of_prompts(rows), update, shape.seed)
        order = [row for group in by_prompt for row in group]
        return cut_evenly(order, total // size, mini_batch_rows=size)


STRATEGIES: Mapping[str, Strategy] = {"prompt": Prompt(), "rows": EvenRows(), "lcm": Lcm()}
"""Strategies by the name that a job gives."""
