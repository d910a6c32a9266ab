"""The job, and the strategies: what a mini-batch is made of. To add one, write its class and
register it below.

Messages take their choices from here; ``PaddingConfig.strategy`` repeats them. A file of that
name in ``configs/padding`` makes it a choice of the config group, ``+padding=<name>``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

from verl_padding.errors import PlanError, plural
from verl_padding.plan.calls import (
    Call,
    OptimizerSteps,
    Packer,
    Pass,
    Sharing,
    Update,
    check_fields,
)
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.mini_batches import (
    MiniBatches,
    cut_evenly,
    even_groups,
    ordered,
)
from verl_padding.plan.row_keys import rows_by_name
from verl_padding.plan.rows import Rows


class Strategy(ABC):
    """A way to cut the rows of an update into mini-batches, one optimizer step each."""

    has_own_steps: ClassVar[bool] = False
    """Whether it has its own rule for the number of optimizer steps, whatever a job says."""

    def check(self, job: Job, name: str) -> None:
        """Raises a PlanError if the update called ``name`` cannot be cut like this, whatever its
        rows. By default, that is if a fixed number of prompts does not divide into whole
        mini-batches."""
        update, prompts = job.updates[name], job.prompts_setting
        size = update.prompts_per_mini_batch
        if job.optimizer_steps == "configured" and job.prompts % size:
            raise PlanError(
                f"{update.mini_batch_setting}={size} of {name!r} does not divide "
                f"{prompts}={job.prompts}: set it to a divisor, or make {prompts} a multiple of "
                f"{size}"
            )

    @abstractmethod
    def cut(self, rows: Rows, job: Job, update: Update) -> MiniBatches:
        """Cuts the rows (one at least) for an update."""

    def describe_steps(self, job: Job, update: Update) -> str:
        """How many optimizer steps an update takes, in words."""
        if self.has_own_steps or job.optimizer_steps == "by_rows":
            return f"one optimizer step for {plural(job.mini_batch_rows(update), 'row')}"
        return f"{plural(job.configured_steps(update), 'optimizer step')} per batch"


class Prompt(Strategy):
    """A mini-batch is an even share of the prompts, with all their rows.

    Numbers of prompts differ by at most one, numbers of rows by at most the largest prompt's.
    """

    def cut(self, rows: Rows, job: Job, update: Update) -> MiniBatches:
        steps = job.steps_of_batch(update, len(rows))
        rows_P = ordered(list(rows_by_name(rows.prompt_R).values()), update, job.seed)
        groups = even_groups([len(group) for group in rows_P], min(steps, len(rows_P)))
        rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
        # By rows, it is the rule that prompts of many rows take a step each, and no more.
        by_rows = job.optimizer_steps == "by_rows"
        return MiniBatches(rows_M=rows_M, steps=len(groups) if by_rows else steps)


class EvenRows(Strategy):
    """A mini-batch is an even share of the rows, without regard to prompts.

    Numbers of rows differ by at most one.
    """

    def cut(self, rows: Rows, job: Job, update: Update) -> MiniBatches:
        steps = job.steps_of_batch(update, len(rows))
        return cut_evenly(ordered(range(len(rows)), update, job.seed), steps)


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

    def check(self, job: Job, name: str) -> None:
        update = job.updates[name]
        rows, unit = job.mini_batch_rows(update), update.dp_size * update.local_batch_multiple
        if rows % unit:
            prompts = f"{update.mini_batch_setting}={update.prompts_per_mini_batch}"
            sessions = f"{job.sessions_setting}={job.sessions_per_prompt}"
            raise PlanError(
                f"padding.strategy='lcm': a mini-batch of {name!r} has {prompts} x {sessions} = "
                f"{rows} rows, not a multiple of {unit} ({update.dp_size} data-parallel ranks x "
                f"{update.local_batch_multiple} of a micro-batch); change one or choose another "
                "strategy"
            )

    def cut(self, rows: Rows, job: Job, update: Update) -> MiniBatches:
        updates, size = job.updates.values(), job.mini_batch_rows(update)
        sizes = [n for one in updates for n in (one.dp_size, job.mini_batch_rows(one))]
        total = padded_rows(len(rows), job.row_multiple, *sizes)
        by_prompt = ordered(list(rows_by_name(rows.prompt_R).values()), update, job.seed)
        order = [row for group in by_prompt for row in group]
        return cut_evenly(order, total // size, mini_batch_rows=size)


STRATEGIES: Mapping[str, Strategy] = {"prompt": Prompt(), "rows": EvenRows(), "lcm": Lcm()}
"""Strategies by the name that a job gives."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All worker calls of one local update, and how their rows are arranged."""

    strategy: str
    """Name in ``STRATEGIES``: what a mini-batch is made of."""
    prompts: int
    """Prompts configured for the step; fewer may arrive."""
    sessions_per_prompt: int
    """Rollouts of a prompt."""
    updates: Mapping[str, Update]
    """Training calls by name."""
    inference: Mapping[str, Pass]
    """Calls without training, by name."""
    row_multiple: int = 1
    """``lcm`` pads the rows to a multiple of this, and of what the updates require."""
    seed: int = 0
    """Seed of the permutations of updates that shuffle."""
    optimizer_steps: OptimizerSteps = "configured"
    """How many a batch takes, unless the strategy has a rule of its own: as many as
    configured, or as its rows fill."""
    prompts_setting: str = "prompts"
    """Setting of ``prompts``, for messages."""
    sessions_setting: str = "sessions_per_prompt"
    """Setting of ``sessions_per_prompt``, for messages."""
    packer: Packer = "verl"
    """What cuts micro-batches by tokens: verl's packer in the workers, or the plan."""
    sharing: Sharing = "off"
    """``on``: common prefixes of a micro-batch's rows are computed once."""
    may_branch: bool = True
    """Whether rows that branch share the tokens before; if not, a row shares all of its tokens or
    none."""
    pad_tokens: int = 2
    """Tokens of a pad, prompt and response together."""
    cost_model: str = "attention"
    """Name in ``COST_MODELS``: the cost by which ranks are balanced."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sharing != "off" and self.packer != "plan":
            raise PlanError(
                f"padding.sharing={self.sharing!r} with padding.packer={self.packer!r}: only the "
                "plan keeps rows that share together; choose padding.packer='plan'"
            )
        assert self.updates.keys().isdisjoint(self.inference), "each call has a name of its own"
        for name in self.updates:
            STRATEGIES[self.strategy].check(self, name)
        for name, call in self.calls():
            if call.token_budget is None:
                continue
            if call.padded_to != "row" and self.packer == "verl":
                raise PlanError(
                    f"padded_to={call.padded_to!r} of {name!r}: verl's packer counts the tokens "
                    "of rows without their padding; choose padding.packer='plan'"
                )
            if self.pad_tokens > call.token_budget:
                raise PlanError(
                    f"padding.pad_length={self.pad_tokens}: a pad does not fit into the "
                    f"{call.token_budget} tokens of a micro-batch of {name!r}; make pads shorter "
                    f"or raise {call.budget_setting}"
                )

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Every worker call with its name, updates first."""
        yield from self.updates.items()
        yield from self.inference.items()

    def configured_steps(self, update: Update) -> int:
        """Optimizer steps if all prompts have arrived, with one row a session."""
        return self.prompts // update.prompts_per_mini_batch

    def steps_of_batch(self, update: Update, n_rows: int) -> int:
        """Optimizer steps of a batch, if it has a unit for each."""
        # Mini-batches of 15 prompts x 8 sessions: 360 rows fill three, and 361 begin a fourth.
        if self.optimizer_steps == "by_rows":
            return -(-n_rows // self.mini_batch_rows(update))
        return self.configured_steps(update)

    def mini_batch_rows(self, update: Update) -> int:
        """Rows of a mini-batch when every session is one row."""
        return update.prompts_per_mini_batch * self.sessions_per_prompt
