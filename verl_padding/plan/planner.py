"""From rows and a job to a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from verl_padding.plan.balance import Ranks, deal_rows, lower_bound
from verl_padding.plan.batch_plan import BatchPlan, LayoutFigures
from verl_padding.plan.cost import COST_MODELS
from verl_padding.plan.errors import NoRealRowError, RowTooLongError
from verl_padding.plan.job import Job, Pass, setting_of
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batches import MiniBatches, cut_mini_batches
from verl_padding.plan.rows import Rows

CELL_GROWTHS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Rows that a cell may hold, over the fewest it must: more of them let cost be balanced freely, and cost pads."""

WORTH_A_PAD = 0.005
"""A larger cell must make the update faster by this share to be worth its pads."""


def plan_batch(rows: Rows, job: Job) -> BatchPlan:
    """Plans every worker call of a step; the same input gives the same plan, on every machine.

    Raises:
        NoRealRowError: there are no rows.
        RowTooLongError: a row is longer than the token budget of a worker call.
    """
    if not len(rows):
        raise NoRealRowError(
            "no real row in the batch: every session failed or came back empty. Look for errors of the agent "
            "loop, or let verl refill failed groups (trainer.v1.sampler.sync_refill_failed_groups=True)"
        )
    for name, call in job.calls():
        _refuse_too_long(rows, name, call)
    cost = COST_MODELS[job.cost_model]
    costs = np.asarray(cost(np.asarray(rows.tokens_R, dtype=np.int64)), dtype=np.float64)
    pad_cost = float(cost(np.asarray([job.pad_tokens], dtype=np.int64))[0])
    layouts: dict[str, Layout] = {}
    figures: dict[str, LayoutFigures] = {}
    warnings = []
    for name, update in job.updates.items():
        mini_batches, configured = cut_mini_batches(rows, job, update)
        if len(mini_batches) < configured:
            unit = "prompts" if job.strategy == "prompt" else "rows"
            warnings.append(
                f"{len(mini_batches)} optimizer steps of {name!r} instead of {configured}: only {len(mini_batches)} "
                f"{unit} arrived, and a step without real rows would train on nothing"
            )
        cell_rows = None
        if job.strategy == "lcm":
            cell_rows = job.mini_batch_rows(update) // update.dp_size
        layouts[name] = _lay_out(mini_batches, update, costs, pad_cost, cell_rows)
        figures[name] = _judge(layouts[name], costs, pad_cost)
    for name, call in job.inference.items():
        layouts[name] = _lay_out([list(range(len(rows)))], call, costs, pad_cost, None)
        figures[name] = _judge(layouts[name], costs, pad_cost)
    return BatchPlan(n_rows=len(rows), layouts=layouts, figures=figures, warnings=tuple(warnings))


def _lay_out(
    mini_batches: MiniBatches, call: Pass, costs: np.ndarray, pad_cost: float, cell_rows: int | None
) -> Layout:
    """Deals out all mini-batches, with the cell size that pays best, and fills the cells with pads.

    Where micro-batches are cut by tokens, pads are nearly free, so cells may grow to let the ranks' costs level.
    Where they are cut by rows, each micro-batch of pads costs a forward pass like any other: cells stay small.
    """
    n_ranks = call.dp_size
    fewest = cell_rows or _rounded_up(math.ceil(max(map(len, mini_batches)) / n_ranks), call.cell_multiple)
    growths: Iterable[float] = (1.0,) if cell_rows or call.token_budget is None else CELL_GROWTHS
    # A cell of all rows is as free as can be.
    most = max(map(len, mini_batches))
    limits = sorted(
        {_rounded_up(min(math.ceil(fewest * growth), max(most, fewest)), call.cell_multiple) for growth in growths}
    )
    best: tuple[float, int, list[Ranks]] | None = None
    for limit in limits:
        dealt = [deal_rows(rows, costs, n_ranks, limit) for rows in mini_batches]
        size = cell_rows or _rounded_up(max(len(rank) for ranks in dealt for rank in ranks), call.cell_multiple)
        time = sum(max(_cell_cost(rank, size, costs, pad_cost) for rank in ranks) for ranks in dealt)
        if best is None or time < best[0] * (1 - WORTH_A_PAD):
            best = (time, size, dealt)
    assert best is not None
    _, size, dealt = best
    n_rows = len(costs)
    next_pad = n_rows
    cells = []
    for ranks in dealt:
        filled = []
        for rank in ranks:
            pads = size - len(rank)
            filled.append((*rank, *range(next_pad, next_pad + pads)))
            next_pad += pads
        cells.append(tuple(filled))
    return Layout(n_rows=n_rows, cells=tuple(cells))


def _judge(layout: Layout, costs: np.ndarray, pad_cost: float) -> LayoutFigures:
    n_rows, slowest, mean, bound = layout.n_rows, 0.0, 0.0, 0.0
    for ranks in layout.cells:
        real = [[row for row in cell if row < n_rows] for cell in ranks]
        loads = [_cell_cost(rank, layout.rows_per_cell, costs, pad_cost) for rank in real]
        slowest += max(loads)
        mean += sum(loads) / len(loads)
        bound += lower_bound(costs[[row for rank in real for row in rank]], layout.dp_size)
    return LayoutFigures(
        imbalance=slowest / mean,
        over_lower_bound=slowest / bound,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        rows_per_cell=layout.rows_per_cell,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
    )


def _cell_cost(rows: list[int], size: int, costs: np.ndarray, pad_cost: float) -> float:
    return float(costs[rows].sum()) + (size - len(rows)) * pad_cost


def _rounded_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def _refuse_too_long(rows: Rows, name: str, call: Pass) -> None:
    if call.token_budget is None:
        return
    longest = max(range(len(rows)), key=rows.tokens_R.__getitem__)
    tokens = rows.tokens_R[longest]
    if tokens > call.token_budget:
        raise RowTooLongError(
            f"row {rows.key_R[longest]!r} has {tokens} tokens (prompt and response), more than the "
            f"{call.token_budget} that a micro-batch of {name!r} may hold on a rank: raise {setting_of(call)} so "
            f"that it allows {tokens}, or make rows shorter (data.max_prompt_length, data.max_response_length)"
        )
