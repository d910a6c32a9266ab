"""The rows of an update, cut into mini-batches, and what strategies have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from verl_padding.plan.calls import Update
from verl_padding.plan.errors import PlanError
from verl_padding.plan.even_cuts import even_ranges
from verl_padding.plan.rows import Rows
from verl_padding.plan.step_shape import StepShape

Unit = TypeVar("Unit")


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """The real rows of an update, cut into mini-batches."""

    rows_M: list[list[int]]
    """Numbers of the real rows of each mini-batch; none is empty."""

    mini_batch_rows: int | None = None
    """Rows of a mini-batch, pads among them, if the strategy fixes their number."""

    warning: str | None = None
    """Why there are fewer optimizer steps than configured."""


def cut_evenly(order: Sequence[int], steps: int, name: str, mini_batch_rows: int | None = None) -> MiniBatches:
    """Cuts rows in their order; counts differ by at most one, the larger ones first."""
    n_parts = min(steps, len(order))
    rows_M = [[order[place] for place in part] for part in even_ranges(len(order), n_parts)]
    warning = None
    if n_parts < steps:
        warning = (
            f"{name}: only {n_parts} of {steps} optimizer steps, because each step needs a row and the batch has only "
            f"{len(order)}"
        )
    return MiniBatches(rows_M=rows_M, mini_batch_rows=mini_batch_rows, warning=warning)


def rows_of_prompts(rows: Rows) -> list[list[int]]:
    """Rows of each prompt, prompts in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(rows.prompt_R):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


def ordered(units: Sequence[Unit], update: Update, seed: int) -> list[Unit]:
    """The units in their order, or in an order drawn with the seed if the update shuffles."""
    if not update.shuffle:
        return list(units)
    permutation = np.random.default_rng(seed).permutation(len(units))
    return [units[unit] for unit in permutation.tolist()]


def check_prompts_divide(shape: StepShape, name: str) -> None:
    """
    Raises:
        PlanError: the prompts do not divide into whole mini-batches of the update called ``name``.
    """
    update, prompts = shape.updates[name], shape.prompts_setting
    size = update.prompts_per_mini_batch
    if shape.prompts % size:
        divisors = [d for d in range(1, shape.prompts + 1) if shape.prompts % d == 0]
        below = max((d for d in divisors if d < size), default=1)
        above = min((d for d in divisors if d > size), default=below)
        choices = f"{below}" if above == below else f"{below} or {above}"
        raise PlanError(
            f"{update.mini_batch_setting}={size} of {name!r} does not divide {prompts}={shape.prompts}: set it to "
            f"{choices}, or make {prompts} a multiple of {size}"
        )
