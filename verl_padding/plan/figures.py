"""Judges a layout by what its ranks cost."""

from __future__ import annotations

import numpy as np

from verl_padding.plan.balance import lower_bound
from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.cost import CostModel, Int64s
from verl_padding.plan.layout import Layout


def judge(layout: Layout, tokens_R: Int64s, *, cost_model: CostModel, pad_tokens: int) -> LayoutFigures:
    """The figures of a layout; the lower bound is that of its real rows in its mini-batches."""
    n_rows, n_ranks = len(tokens_R), layout.dp_size
    cost_R = cost_model(np.append(tokens_R, np.full(layout.n_pads, pad_tokens, dtype=np.int64)))
    slowest = total = bound = 0
    for ranks in layout.cells:
        cells = np.array(ranks, dtype=np.int64)
        load_D = cost_R[cells].sum(axis=1)
        slowest += int(load_D.max())
        total += int(load_D.sum())
        bound += lower_bound(cost_R[cells[cells < n_rows]], n_ranks)
    return LayoutFigures(
        imbalance=slowest * n_ranks / total,
        over_lower_bound=slowest / bound,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        rows_per_cell=layout.rows_per_cell,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
    )
