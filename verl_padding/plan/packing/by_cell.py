"""Cuts cells into micro-batches by tokens, each cell by itself, for ranks that meet at its end only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.bins import Bin, first_fit, spread
from verl_padding.plan.packing.cell_size import balanced_cells, up_to_multiple
from verl_padding.plan.packing.pads import FilledCells, cheap_at_both_ends, pads_in_room
from verl_padding.plan.packing.way import Way


class ByCell(Way):
    """Balanced cells, each cut into as few micro-batches as hold all of them; those of a rank cost about the same.

    Not where chains are computed once: cells that are cut by themselves know nothing of them. Levels do, and what
    balances them balances cells, too.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return costs.call.ranks_meet == "mini_batch" and costs.chain_R is None

    def fill(self, costs: CallCosts, mini_batches: MiniBatches) -> list[FilledCells]:
        size, rows_MD = balanced_cells(costs, mini_batches)
        return [cut_by_cell(costs, rows_D, size) for rows_D in rows_MD]


def cut_by_cell(costs: CallCosts, rows_D: Sequence[Sequence[int]], size: int) -> FilledCells:
    """Cuts balanced cells, whose pads always fit in the end: with a micro-batch for each row or pad.

    Args:
        rows_D: real rows of each rank.
        size: rows of a cell, pads among them.
    """
    call = costs.call
    assert call.token_budget is not None
    longest_first_D = [costs.longest_first(rows).tolist() for rows in rows_D]
    tokens_DI = [costs.tokens_R[rows].tolist() for rows in longest_first_D]
    cost_DI = [costs.cost_R[rows].tolist() for rows in longest_first_D]
    tight_D = [first_fit(tokens, cost, call.token_budget) for tokens, cost in zip(tokens_DI, cost_DI, strict=True)]
    n_bins = up_to_multiple(max(map(len, tight_D)), call.micro_batch_multiple)
    while True:
        rows_DK = []
        for rows, tokens, cost, tight in zip(longest_first_D, tokens_DI, cost_DI, tight_D, strict=True):
            goal = -(-sum(cost) // n_bins)
            bins = spread(range(len(rows)), tokens, cost, [goal] * n_bins, call.token_budget)
            bins_K = bins or _split(tight, cost, n_bins)
            bins_K.sort(key=lambda items: -sum(cost[item] for item in items))
            rows_DK.append(cheap_at_both_ends([[rows[item] for item in items] for items in bins_K]))
        pads_DK = pads_in_room(costs, rows_DK, size)
        if pads_DK is not None:
            _, load_DK = costs.sums(rows_DK)
            slowest_K = (load_DK + costs.pad * np.array(pads_DK)).max(axis=0)
            return FilledCells(rows_DK=rows_DK, pads_DK=pads_DK, time=int(slowest_K.sum()) + n_bins * costs.level)
        n_bins += call.micro_batch_multiple


def _split(bins: list[Bin], cost_I: Sequence[int], n_bins: int) -> list[Bin]:
    """Splits the costliest bins of more than one item until there are ``n_bins``, or no such bin; then empty ones."""
    bins = list(bins)
    while len(bins) < n_bins:
        costliest = max(
            (number for number, items in enumerate(bins) if len(items) > 1),
            key=lambda number: sum(cost_I[item] for item in bins[number]),
            default=None,
        )
        if costliest is None:
            return bins + [[] for _ in range(n_bins - len(bins))]
        items = bins[costliest]
        bins[costliest] = items[::2]
        bins.append(items[1::2])
    return bins
