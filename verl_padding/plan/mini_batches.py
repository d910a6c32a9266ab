"""Cuts the rows of a batch into mini-batches: one function a strategy, all from the same order of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from verl_padding.plan.job import Job, Update
from verl_padding.plan.rows import Rows

MiniBatches = list[list[int]]
"""Row numbers of each mini-batch."""


def cut_mini_batches(rows: Rows, job: Job, update: Update) -> tuple[MiniBatches, int]:
    """The mini-batches of an update, and how many of them are configured: there are fewer when units are.

    A unit is what a strategy does not cut: a prompt with all its rows, or a row.
    """
    prompts = _rows_by_prompt(rows)
    if update.shuffle:
        rng = np.random.default_rng(job.seed)
        prompts = [prompts[i] for i in rng.permutation(len(prompts))]
    steps = configured_steps(len(rows), job, update)
    if job.strategy == "prompt":
        return _whole_prompts(prompts, min(steps, len(prompts))), steps
    in_order = [row for prompt in prompts for row in prompt]
    if job.strategy == "rows" and update.shuffle:
        in_order = [in_order[i] for i in rng.permutation(len(in_order))]
    return _cut_evenly(in_order, min(steps, len(rows))), steps


def configured_steps(n_rows: int, job: Job, update: Update) -> int:
    """Mini-batches of an epoch: a constant of the job, but for ``lcm``, where they follow the rows as in verl."""
    if job.strategy == "lcm":
        return lcm_rows(n_rows, job) // job.mini_batch_rows(update)
    return job.prompts // update.prompts_per_mini_batch


def lcm_rows(n_rows: int, job: Job) -> int:
    """Rows after verl's padding (verl 0.9.1, trainer_base.py, ``_get_required_batch_multiple``)."""
    sizes = [job.mini_batch_rows(update) for update in job.updates.values()]
    multiple = math.lcm(*(call.dp_size for _, call in job.calls()), *sizes)
    return math.ceil(n_rows / multiple) * multiple


def _rows_by_prompt(rows: Rows) -> list[list[int]]:
    """Row numbers of each prompt, prompts in order of their first row."""
    prompts: dict[str, list[int]] = {}
    for row, prompt in enumerate(rows.prompt_R):
        prompts.setdefault(prompt, []).append(row)
    return list(prompts.values())


def _cut_evenly(units: Sequence[int], parts: int) -> MiniBatches:
    """Consecutive parts whose sizes differ by at most one: 7 units in 3 parts are 2, 2 and 3."""
    bounds = [len(units) * part // parts for part in range(parts + 1)]
    return [list(units[a:b]) for a, b in pairwise(bounds)]


def _whole_prompts(prompts: Sequence[Sequence[int]], parts: int) -> MiniBatches:
    """Mini-batches of equally many prompts (one more or less), whose rows differ by at most one prompt's rows.

    All cells of a plan hold as many rows as the fullest one, so a mini-batch with many rows costs pads in all
    others. Starting from the cut in order, prompts are moved or swapped between the fullest and the emptiest
    mini-batch while that brings them closer. Where it ends, the gap D is at most the rows u of the largest
    prompt: with a prompt more in the fullest, moving one of fewer than D rows would help, so D <= u; else the
    fullest has a prompt a of more rows than some b in the emptiest, and swapping them would help unless
    D <= a - b < u. A batch whose prompts all have the same number of rows stays in order.
    """
    cut = _cut_evenly(range(len(prompts)), parts)
    sizes = [len(prompt) for prompt in prompts]
    rows = [sum(sizes[p] for p in part) for part in cut]
    while True:
        full, empty = rows.index(max(rows)), rows.index(min(rows))
        gap = rows[full] - rows[empty]
        # What the gap would shrink by on each side, best first: half of the gap is perfect.
        swaps: list[tuple[int, int, int | None]] = [
            (abs(2 * (sizes[a] - sizes[b]) - gap), a, b)
            for a in cut[full]
            for b in cut[empty]
            if 0 < sizes[a] - sizes[b] < gap
        ]
        if len(cut[full]) > len(cut[empty]):
            swaps += [(abs(2 * sizes[a] - gap), a, None) for a in cut[full] if sizes[a] < gap]
        if not swaps:
            break
        _, a, b = min(swaps, key=lambda swap: (swap[0], swap[1], -1 if swap[2] is None else swap[2]))
        cut[full].remove(a)
        cut[empty].append(a)
        if b is not None:
            cut[empty].remove(b)
            cut[full].append(b)
        shift = sizes[a] - (0 if b is None else sizes[b])
        rows[full] -= shift
        rows[empty] += shift
    return [[row for prompt in sorted(part) for row in prompts[prompt]] for part in cut]
