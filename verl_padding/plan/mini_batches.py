"""Cuts the rows of a batch into mini-batches, one optimizer step each: the three strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeVar

import numpy as np

from verl_padding.plan.even_cuts import even_groups, even_ranges
from verl_padding.plan.job import Job, Update
from verl_padding.plan.rows import Rows

MiniBatches = list[list[int]]
Unit = TypeVar("Unit")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The real rows of an update, cut into mini-batches."""

    rows_M: MiniBatches
    """Numbers of the real rows of each mini-batch; none is empty."""

    mini_batch_rows: int | None = None
    """Rows of a mini-batch, pads among them, where the strategy fixes it."""

    warning: str | None = None
    """Why there are fewer optimizer steps than configured."""


def cut_mini_batches(rows: Rows, job: Job, name: str) -> Cut:
    """Cuts the rows of the update called ``name`` as the job's strategy says."""
    update = job.updates[name]
    if job.strategy == "lcm":
        return _cut_fixed_size(rows, job, name)
    steps = job.prompts // update.prompts_per_mini_batch
    if job.strategy == "rows":
        order = _ordered(range(len(rows)), update, job)
        return _cut_evenly(order, steps, name)
    return _cut_by_prompt(rows, job, name, steps)


def _cut_by_prompt(rows: Rows, job: Job, name: str, steps: int) -> Cut:
    rows_P = _ordered(_rows_of_prompts(rows), job.updates[name], job)
    n_groups = min(steps, len(rows_P))
    groups = even_groups([len(group) for group in rows_P], n_groups)
    rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
    warning = None
    if n_groups < steps:
        warning = (
            f"{name}: {n_groups} optimizer steps instead of {steps}, for only {len(rows_P)} of {job.prompts} prompts "
            "have arrived and each step needs one"
        )
    return Cut(rows_M=rows_M, warning=warning)


def _cut_evenly(order: Sequence[int], steps: int, name: str, mini_batch_rows: int | None = None) -> Cut:
    """Cuts rows in their order; counts differ by at most one, the larger ones first."""
    n_parts = min(steps, len(order))
    rows_M = [[order[place] for place in part] for part in even_ranges(len(order), n_parts)]
    warning = None
    if n_parts < steps:
        warning = (
            f"{name}: {n_parts} optimizer steps instead of {steps}, for the batch has only {len(order)} rows and "
            "each step needs one"
        )
    return Cut(rows_M=rows_M, mini_batch_rows=mini_batch_rows, warning=warning)


def _cut_fixed_size(rows: Rows, job: Job, name: str) -> Cut:
    """verl's rule: fixed mini-batches, as many as the smallest common multiple that holds the rows has.

    25 rows, four ranks, an actor's mini-batches of 8 and a critic's of 12: multiples of lcm(4, 8, 12) = 24, so
    48 rows; six steps of the actor and four of the critic. Where verl fills the last ones with pads alone, the
    25 rows are spread here: 5 4 4 4 4 4 and 7 6 6 6. While only the critic trains, verl still takes the actor's ranks
    into the multiple, as ``job.row_multiple`` has it.
    """
    multiple = lcm(
        job.row_multiple,
        *(update.dp_size for update in job.updates.values()),
        *(job.mini_batch_rows(update) for update in job.updates.values()),
    )
    total = -(-len(rows) // multiple) * multiple
    size = job.mini_batch_rows(job.updates[name])
    by_prompt = _ordered(_rows_of_prompts(rows), job.updates[name], job)
    order = [row for group in by_prompt for row in group]
    return _cut_evenly(order, total // size, name, mini_batch_rows=size)


def _rows_of_prompts(rows: Rows) -> MiniBatches:
    """Rows of each prompt, prompts in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(rows.prompt_R):
        groups.setdefault(prompt, []).append(row)
    return list(groups.values())


def _ordered(units: Sequence[Unit], update: Update, job: Job) -> list[Unit]:
    """The units in their order, or in an order drawn with the job's seed if the update shuffles."""
    if not update.shuffle:
        return list(units)
    permutation = np.random.default_rng(job.seed).permutation(len(units))
    return [units[unit] for unit in permutation.tolist()]
