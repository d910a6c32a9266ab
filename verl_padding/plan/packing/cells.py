"""Cells of a call: how many rows they hold, which rows each rank gets, and the cutters that then
cut each cell by itself.

Cells need equal row counts, not equal real-row counts: a rank with one long row and eleven pads is
as good as one with twelve short rows. Where micro-batches are cut by tokens, pads are nearly free,
so the ranks are balanced by cost and pads level the counts. Where micro-batches are cut by rows,
each takes a pass of its own even if it holds pads alone, so cells are as small as they can be and
the ranks are balanced under that cap.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.job import Packer
from verl_padding.plan.packing.bins import balance, spread
from verl_padding.plan.packing.cutter import MicroBatchCutter
from verl_padding.plan.packing.pads import Cut, fill_places, with_pads


def up_to_multiple(number: int, multiple: int) -> int:
    """The least multiple that is no smaller."""
    return -(-number // multiple) * multiple


def extra_cost(costs: CallCosts, rows: Sequence[int]) -> Int64s:
    """What each row costs beyond the pad that would stand in its place.

    Each place of a cell costs a rank a pad at least, the same on all ranks; the rest is to be
    balanced.
    """
    return np.maximum(costs.cost_R[np.asarray(rows, dtype=np.int64)] - costs.pad, 0)


def pads_time(costs: CallCosts, size: int, n_rows: int) -> int:
    """How much the pads of a mini-batch of ``n_rows`` real rows delay it, with cells of ``size``
    rows."""
    return size * costs.pad + (costs.call.dp_size * size - n_rows) * costs.pad_handling


def balanced_cells(
    costs: CallCosts, rows: Sequence[int], size: int | None
) -> tuple[int, list[list[int]]]:
    """The rows of a cell, pads among them, and the real rows of each rank, balanced by cost.

    What rows share is not known here: with a forest, the cells are the smallest, and only make sure
    that there is a plan.
    """
    # Rows of 900, 300, 300 and 300 tokens on two ranks: cells of two rows take 1,200 | 600; of
    # three, 900 and two pads | 300 300 300.
    extra_I, n_ranks = extra_cost(costs, rows), costs.call.dp_size
    min_size = costs.call.min_cell_rows(len(rows))
    if size is None and costs.forest is None:
        # A rank with one long row leaves the rest to the others, and pads level the counts, if that
        # pays for the pads.
        tried = []
        for max_rows in (min_size, len(rows)):
            bins = balance(extra_I, n_ranks, max_rows)
            size = up_to_multiple(max(map(len, bins)), costs.call.cell_multiple)
            time = max(int(extra_I[items].sum()) for items in bins) + pads_time(
                costs, size, len(rows)
            )
            tried.append((time, size, bins))
        _, size, bins = min(tried)
    else:
        size = min_size if size is None else size
        bins = balance(extra_I, n_ranks, size)
    return size, [[rows[item] for item in items] for items in bins]


class FixedRowCount(MicroBatchCutter):
    """Micro-batches of a fixed number of rows, and of about the same cost: they need the least
    memory.

    If they are in the same order on all ranks, the costliest first, ranks that synchronize at each
    wait least.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return costs.call.token_budget is None

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        micro_rows, size = costs.call.micro_batch_rows, size or costs.call.min_cell_rows(len(rows))
        # Costs 6 5 2 1 on one rank, two rows a micro-batch: 6 1 and 5 2, the costlier one first.
        n_micro = size // micro_rows

        def micro_batches(rows: Sequence[int]) -> list[list[int]]:
            extra_I = extra_cost(costs, rows)
            bins = balance(extra_I, n_micro, micro_rows)
            costliest_first = np.argsort([-extra_I[items].sum() for items in bins], kind="stable")
            return [[rows[item] for item in bins[number]] for number in costliest_first]

        bins_D = balance(extra_cost(costs, rows), costs.call.dp_size, size)
        rows_DK = [micro_batches([rows[item] for item in items]) for items in bins_D]
        return fill_places(costs, rows_DK, [micro_rows] * n_micro)


class CutByWorkers(MicroBatchCutter):
    """Each cell is in one piece: verl's packer cuts it, in the workers."""

    cuts_micro_batches = False

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return packer == "verl"

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        size, rows_D = balanced_cells(costs, rows, size)
        return fill_places(costs, [[held] for held in rows_D], [size])


class SyncPerStep(MicroBatchCutter):
    """As few micro-batches as hold all cells of a mini-batch, for ranks that synchronize once in
    it.

    Those of a rank cost about the same. Not where rows share: to cut each cell by itself takes no
    account of that. ``SyncPerMicroBatch`` does, and balances the cells as well.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return costs.call.sync_point == "mini_batch" and costs.forest is None

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        size, rows_D = balanced_cells(costs, rows, size)
        return cut_by_cell(costs, rows_D, size)


def cut_by_cell(costs: CallCosts, rows_D: Sequence[Sequence[int]], size: int) -> Cut:
    """Cuts balanced cells of ``size`` rows, whose pads fit in the end, with a micro-batch for each
    row or pad."""
    call = costs.call
    assert call.token_budget is not None
    max_tokens = max(int(costs.tokens_R[rows].sum()) for rows in rows_D)
    n_bins = up_to_multiple(-(-max_tokens // call.token_budget), call.micro_batch_multiple)
    while True:
        rows_DK = [_cell_in_bins(costs, rows, n_bins, call.token_budget) for rows in rows_D]
        held_DK = [rows_K for rows_K in rows_DK if rows_K is not None]
        if len(held_DK) == len(rows_DK):
            filled = with_pads(costs, Cut(rows_DK=held_DK), size)
            if filled is not None:
                return replace(filled, time=costs.micro_steps_time(filled.rows_DK))
        n_bins += call.micro_batch_multiple


def _cell_in_bins(
    costs: CallCosts, rows: Sequence[int], n_bins: int, token_budget: int
) -> list[list[int]] | None:
    """The rows of a cell in micro-batches of about the same cost; None if they have no room."""
    by_length = costs.longest_first(rows)
    tokens, cost = costs.tokens_R[by_length].tolist(), costs.cost_R[by_length].tolist()
    bins = spread(range(len(rows)), tokens, cost, [0] * n_bins, token_budget)
    if bins is None:
        return None
    bins.sort(key=lambda items: -sum(cost[item] for item in items))
    return [by_length[items].tolist() for items in bins]
