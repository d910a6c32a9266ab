"""Cuts cells into micro-batches by tokens, each cell by itself, for ranks that meet at its end only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.calls import Call
from verl_padding.plan.packing.bins import Bin, first_fit, spread
from verl_padding.plan.packing.pads import FilledCells


def cut_by_cell(costs: CallCosts, rows_D: Sequence[Sequence[int]], size: int) -> FilledCells:
    """Cuts cells that are dealt already, each by itself, into as few micro-batches as hold all of them.

    Args:
        rows_D: real rows of each rank.
        size: rows of a cell, pads among them; pads are cut with the rows, so that there is room for them.
    """
    items_D = []
    for rows in rows_D:
        by_length = costs.longest_first(rows)
        tokens = costs.tokens_R[by_length].tolist()
        pads = size - len(rows)
        # A row may be shorter than a pad: keep falling order.
        at = len(tokens) - int(np.searchsorted(tokens[::-1], costs.pad_tokens, side="left"))
        tokens[at:at] = [costs.pad_tokens] * pads
        numbers: list[int | None] = list(by_length.tolist())
        numbers[at:at] = [None] * pads
        cost = [costs.pad if row is None else int(costs.cost_R[row]) for row in numbers]
        items_D.append((numbers, tokens, cost))
    bins_DK = _cut_alike(costs.call, [(tokens, cost) for _, tokens, cost in items_D])
    rows_DK, pads_DK, load_DK = [], [], []
    for (numbers, _, cost), bins_K in zip(items_D, bins_DK, strict=True):
        in_order = _cheap_at_both_ends(bins_K, cost)
        by_number = [[numbers[item] for item in items] for items in in_order]
        rows_DK.append([[row for row in items if row is not None] for items in by_number])
        pads_DK.append([sum(row is None for row in items) for items in by_number])
        load_DK.append([sum(cost[item] for item in items) for items in in_order])
    height = int(np.array(load_DK).max(axis=0).sum())
    return FilledCells(rows_DK=rows_DK, pads_DK=pads_DK, time=height + len(load_DK[0]) * costs.level)


def _cut_alike(call: Call, items_D: list[tuple[list[int], list[int]]]) -> list[list[Bin]]:
    """Bins of each rank, equally many on all; those of a rank cost about the same."""
    budget, multiple = call.token_budget, call.micro_batch_multiple
    assert budget is not None
    tight_D = [first_fit(tokens, cost, budget) for tokens, cost in items_D]
    n_bins = -(-max(map(len, tight_D)) // multiple) * multiple
    bins_DK = []
    for (tokens, cost), tight in zip(items_D, tight_D, strict=True):
        goal = -(-sum(cost) // n_bins)
        bins = spread(range(len(tokens)), tokens, cost, [goal] * n_bins, budget)
        bins_DK.append(_split(tight, cost, n_bins) if bins is None else bins)
    return bins_DK


def _split(bins: list[Bin], cost_I: Sequence[int], n_bins: int) -> list[Bin]:
    """Splits the costliest bins of more than one item until there are ``n_bins``."""
    bins = list(bins)
    while len(bins) < n_bins:
        costliest = max(
            (number for number, items in enumerate(bins) if len(items) > 1),
            key=lambda number: sum(cost_I[item] for item in bins[number]),
        )
        items = bins[costliest]
        bins[costliest] = items[::2]
        bins.append(items[1::2])
    return bins


def _cheap_at_both_ends(bins: list[Bin], cost_I: Sequence[int]) -> list[Bin]:
    """verl's order of micro-batches (``rearrange_micro_batches``): a pipeline fills and drains with cheap ones."""
    costly_first = sorted(bins, key=lambda items: -sum(cost_I[item] for item in items))
    return costly_first[::2][::-1] + costly_first[1::2]
