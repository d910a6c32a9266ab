"""Judges a layout by what its ranks cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.calls import Pass
from verl_padding.plan.cost import Int64s
from verl_padding.plan.layout import Layout
from verl_padding.plan.lower_bounds import equal_blocks_bound, micro_batch_bound, mini_batch_bound
from verl_padding.plan.prices import Prices


def judge(layout: Layout, prices: Prices) -> LayoutFigures:
    """The figures of a layout; lower bounds are those of its real rows in its mini-batches."""
    call, tokens_R, n_rows, n_ranks = prices.call, prices.tokens_R, prices.n_rows, layout.dp_size
    all_tokens_R = np.append(tokens_R, np.full(layout.n_pads, prices.pad_tokens, dtype=np.int64))
    real_cost_R = prices.cost_R
    cost_MDC = [
        prices.cost_model(_computed_tokens(layout, number, all_tokens_R, call))
        for number in range(layout.n_mini_batches)
    ]
    slowest = total = bound = 0
    for ranks, cost_DC in zip(layout.cells, cost_MDC, strict=True):
        cells = np.array(ranks, dtype=np.int64)
        real = cells[cells < n_rows]
        load_D = cost_DC.sum(axis=1)
        slowest += int(load_D.max())
        total += int(load_D.sum())
        least = mini_batch_bound(real_cost_R[real], n_ranks)
        if call.padded_to == "cell":  # one rank has the dearest row, and pads all others to it
            least = max(least, layout.rows_per_cell * int(real_cost_R[real].max()))
        bound += least
    return LayoutFigures(
        imbalance=slowest * n_ranks / total,
        over_lower_bound=slowest / bound,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        rows_per_cell=layout.rows_per_cell,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
        **_micro_figures(layout, tokens_R, real_cost_R, cost_MDC, call),
    )


def _computed_tokens(layout: Layout, mini_batch: int, tokens_R: Int64s, call: Pass) -> Int64s:
    """Tokens (D, C) that each row of a mini-batch's cells is computed as."""
    tokens_DC = tokens_R[np.array(layout.cells[mini_batch], dtype=np.int64)]
    if call.padded_to == "row":
        return tokens_DC
    if call.padded_to == "cell":
        return np.broadcast_to(tokens_DC.max(axis=1, keepdims=True), tokens_DC.shape)
    assert layout.micro_batch_rows is not None
    return np.stack(
        [
            np.repeat(np.maximum.reduceat(tokens_C, _starts(rows_K)), rows_K)
            for tokens_C, rows_K in zip(tokens_DC, layout.micro_batch_rows[mini_batch], strict=True)
        ]
    )


def _starts(rows_K: Sequence[int]) -> Int64s:
    return np.cumsum(rows_K) - np.array(rows_K, dtype=np.int64)


def _micro_figures(
    layout: Layout, tokens_R: Int64s, real_cost_R: Int64s, cost_MDC: list[Int64s], call: Pass
) -> dict[str, Any]:
    if layout.micro_batch_rows is None or layout.n_micro_batches is None:
        return dict.fromkeys(("micro_batches", "packing_efficiency", "micro_imbalance", "micro_over_lower_bound"))
    n_ranks, budget = layout.dp_size, call.token_budget
    slowest = total = bound = 0
    for ranks, rows_DK, cost_DC in zip(layout.cells, layout.micro_batch_rows, cost_MDC, strict=True):
        load_DK = np.stack(
            [np.add.reduceat(cost_C, _starts(rows_K)) for cost_C, rows_K in zip(cost_DC, rows_DK, strict=True)]
        )
        slowest += int(load_DK.max(axis=0).sum())
        total += int(load_DK.sum())
        cells = np.array(ranks, dtype=np.int64)
        real = cells[cells < layout.n_rows]
        if call.padded_to == "micro_batch" and budget is None:
            bound += equal_blocks_bound(real_cost_R[real], n_ranks, call.micro_batch_rows)
        else:
            # Rows that are padded cost no less than packed ones, and no more of them fit into the budget.
            tokens = tokens_R[real]
            bound += micro_batch_bound(tokens, real_cost_R[real], n_ranks, budget or int(tokens.sum()))
    micro_batches = layout.n_micro_batches
    return {
        "micro_batches": micro_batches,
        "packing_efficiency": None if budget is None else int(tokens_R.sum()) / (micro_batches * n_ranks * budget),
        "micro_imbalance": slowest * n_ranks / total,
        "micro_over_lower_bound": slowest / bound,
    }
