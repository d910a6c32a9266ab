"""How many rows the cells of a call hold, and which rows each rank gets so that all ranks cost about the same.

Cells need equal row counts, not equal real-row counts: a rank with one long row and eleven pads is as good as one
with twelve short rows. Where micro-batches are cut by tokens, pads are nearly free, so the ranks are balanced by
cost and pads level the counts. Where micro-batches are cut by rows, each takes a pass of its own even if it holds
pads alone, so cells are as small as they can be and the ranks are balanced under that cap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.balance import balance
from verl_padding.plan.packing.bins import Bin


def least_size(costs: CallCosts, mini_batches: MiniBatches) -> int:
    """The fewest rows that the cells of a call can hold: an even share of its fullest mini-batch, or of a fixed one."""
    if mini_batches.mini_batch_rows is not None:
        return mini_batches.mini_batch_rows // costs.call.dp_size
    most = max(-(-len(rows) // costs.call.dp_size) for rows in mini_batches.rows_M)
    return up_to_multiple(most, costs.call.cell_multiple)


def may_grow(costs: CallCosts, mini_batches: MiniBatches) -> bool:
    """Whether cells may hold more rows than the least if that makes the step shorter."""
    return mini_batches.mini_batch_rows is None and costs.call.token_budget is not None


def balanced_cells(costs: CallCosts, mini_batches: MiniBatches) -> tuple[int, list[list[list[int]]]]:
    """The rows of a cell, pads among them, and the real rows of each mini-batch and rank, balanced by cost.

    What a chain costs is not known here: with chains, the cells are the least, and only make sure that there is a plan.
    """
    size, rows_M = least_size(costs, mini_batches), mini_batches.rows_M
    extra_M = [extra_cost(costs, rows) for rows in rows_M]
    if may_grow(costs, mini_batches) and costs.chain_R is None:
        size, bins_M = _trade_pads_for_balance(costs, extra_M, size)
    else:
        bins_M = [balance(extra_I, costs.call.dp_size, size) for extra_I in extra_M]
    return size, [[[rows[item] for item in items] for items in bins] for rows, bins in zip(rows_M, bins_M, strict=True)]


def extra_cost(costs: CallCosts, rows: Sequence[int]) -> Int64s:
    """What each row costs beyond the pad that would stand in its place.

    Each place of a cell costs a rank a pad at least, the same on all ranks; the rest is to be balanced.
    """
    return np.maximum(costs.cost_R[np.asarray(rows, dtype=np.int64)] - costs.pad, 0)


def pads_time(costs: CallCosts, size: int, n_mini_batches: int) -> int:
    """How much the pads of a call delay it, with cells of ``size`` rows."""
    pads = n_mini_batches * costs.call.dp_size * size - costs.n_rows
    return n_mini_batches * size * costs.pad + pads * costs.pad_handling


def _trade_pads_for_balance(costs: CallCosts, extra_M: list[Int64s], least: int) -> tuple[int, list[list[Bin]]]:
    """The size of a cell, and the ranks' rows, for which the step takes the least time.

    Free balance asks for cells as large as the fullest rank of any mini-batch, and every cell of the call must
    then be as large: one row of 30k tokens leaves its rank with no other row, the rest of that mini-batch fills
    the other ranks, and the cells of all mini-batches grow with them. So sizes between the least and the free
    one are tried, and each is scored by the time of the slowest ranks, pads in the cells included, plus what
    the handling of all pads takes. One mini-batch of many then gives up some balance before thousands of pads
    are made, and where a long row decides the time anyway its rank takes short rows until the pads are gone.
    """
    n_ranks, multiple = costs.call.dp_size, costs.call.cell_multiple

    def step_cost(size: int, bins_M: list[list[Bin]]) -> int:
        return sum(map(_costliest, extra_M, bins_M)) + pads_time(costs, size, len(extra_M))

    bins_M = [balance(extra_I, n_ranks) for extra_I in extra_M]
    size = up_to_multiple(max(len(items) for bins in bins_M for items in bins), multiple)
    best = (step_cost(size, bins_M), size)
    best_bins_M = bins_M
    for tried in reversed(sizes_between(least, size, multiple)):
        # Mini-batches that fit already stay as they are.
        bins_M = [
            bins if max(map(len, bins)) <= tried else balance(extra_I, n_ranks, tried)
            for extra_I, bins in zip(extra_M, bins_M, strict=True)
        ]
        scored = (step_cost(tried, bins_M), tried)
        if scored < best:
            best, best_bins_M = scored, bins_M
    return best[1], best_bins_M


def _costliest(cost_I: Int64s, bins: list[Bin]) -> int:
    """Cost of the costliest bin."""
    return max(int(cost_I[items].sum()) if items else 0 for items in bins)


def up_to_multiple(number: int, multiple: int) -> int:
    """The least multiple that is no smaller."""
    return -(-number // multiple) * multiple


def sizes_between(least: int, free: int, multiple: int) -> list[int]:
    """Sizes from ``least`` to below ``free``, in steps that double: least + 0, 1, 2, 4, 8 .. multiples."""
    sizes, step = [], 0
    while least + step * multiple < free:
        sizes.append(least + step * multiple)
        step = 2 * step or 1
    return sizes
