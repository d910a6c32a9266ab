"""Judges a layout by what its ranks cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.cost import CostModel, Int64s
from verl_padding.plan.job import Pass
from verl_padding.plan.layout import Layout
from verl_padding.plan.lower_bounds import micro_batch_bound, mini_batch_bound


def judge(layout: Layout, tokens_R: Int64s, call: Pass, *, cost_model: CostModel, pad_tokens: int) -> LayoutFigures:
    """The figures of a layout; lower bounds are those of its real rows in its mini-batches."""
    n_rows, n_ranks = len(tokens_R), layout.dp_size
    all_tokens_R = np.append(tokens_R, np.full(layout.n_pads, pad_tokens, dtype=np.int64))
    cost_R = cost_model(all_tokens_R)
    slowest = total = bound = 0
    for ranks in layout.cells:
        cells = np.array(ranks, dtype=np.int64)
        load_D = cost_R[cells].sum(axis=1)
        slowest += int(load_D.max())
        total += int(load_D.sum())
        bound += mini_batch_bound(cost_R[cells[cells < n_rows]], n_ranks)
    return LayoutFigures(
        imbalance=slowest * n_ranks / total,
        over_lower_bound=slowest / bound,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        rows_per_cell=layout.rows_per_cell,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
        **_micro_figures(layout, all_tokens_R, cost_R, total, call),
    )


def _micro_figures(layout: Layout, tokens_R: Int64s, cost_R: Int64s, total: int, call: Pass) -> dict[str, Any]:
    if layout.micro_batch_rows is None or layout.n_micro_batches is None:
        return dict.fromkeys(("micro_batches", "packing_efficiency", "micro_imbalance", "micro_over_lower_bound"))
    n_ranks, budget = layout.dp_size, call.token_budget
    slowest = bound = 0
    for ranks, rows_DK in zip(layout.cells, layout.micro_batch_rows, strict=True):
        cells = np.array(ranks, dtype=np.int64)
        starts_DK = np.cumsum(np.array(rows_DK), axis=1) - np.array(rows_DK)
        load_DK = np.stack(
            [np.add.reduceat(cost_R[cell], starts) for cell, starts in zip(cells, starts_DK, strict=True)]
        )
        slowest += int(load_DK.max(axis=0).sum())
        real = cells[cells < layout.n_rows]
        bound += micro_batch_bound(tokens_R[real], cost_R[real], n_ranks, budget or int(tokens_R[real].sum()))
    micro_batches = layout.n_micro_batches
    real_tokens = int(tokens_R[: layout.n_rows].sum())
    return {
        "micro_batches": micro_batches,
        "packing_efficiency": None if budget is None else real_tokens / (micro_batches * n_ranks * budget),
        "micro_imbalance": slowest * n_ranks / total,
        "micro_over_lower_bound": slowest / bound,
    }
