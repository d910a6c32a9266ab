"""Cuts mini-batches into micro-batches by tokens, for ranks that meet at every one of them.

Micro-batch k of all ranks is a level. Rows are packed into levels first, whatever rank they will be on
(:mod:`~verl_padding.plan.packing.levels`), then ranks get a bin of each level, and then the pads find their places
(:mod:`~verl_padding.plan.packing.fitting`).
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.chains import members_of_chains
from verl_padding.plan.job import Packer
from verl_padding.plan.lower_bounds import micro_batch_bound
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.bins import Bin
from verl_padding.plan.packing.by_cell import cut_by_cell
from verl_padding.plan.packing.cell_size import balanced_cells, may_grow, pads_time, sizes_between, up_to_multiple
from verl_padding.plan.packing.fitting import Cut, fit
from verl_padding.plan.packing.levels import LevelPacker, Levels
from verl_padding.plan.packing.pads import FilledCells, least_rows
from verl_padding.plan.packing.way import Way

POLISH_PAIRS = 1 << 22
"""How long the micro-batches of one call are polished, in pairs of rows compared: about a tenth of a second."""

POLISHED = 3
"""How many of the best ways to cut a mini-batch are polished; for a large one, only the best is."""

LARGE = 1024
"""A mini-batch with more rows is large: the ways to cut it differ little once they are polished."""


class ByLevel(Way):
    """Cells of all mini-batches are of one size, so each mini-batch offers several cuts and the size decides which fit.

    Cutting the balanced cells always fits, from their size on.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return True

    def fill(self, costs: CallCosts, mini_batches: MiniBatches) -> list[FilledCells]:
        """Cuts with cells of the size that takes the least time."""
        size, rows_MD = balanced_cells(costs, mini_batches)
        n_mini, multiple, grows = len(rows_MD), costs.call.cell_multiple, may_grow(costs, mini_batches)
        most = None if grows else size
        offers_M = [ways_to_cut(costs, rows, POLISH_PAIRS // n_mini, most) for rows in mini_batches.rows_M]
        least_time = sum(min((cut.time for cut in cuts), default=0) for cuts, _ in offers_M)
        sizes = {size}
        if grows:
            needed = {up_to_multiple(least_rows(cut.rows_DK), multiple) for cuts, _ in offers_M for cut in cuts}
            sizes |= {rows for rows in needed if rows > size}
            sizes |= set(sizes_between(size, max(sizes), multiple))
        best: tuple[int, list[FilledCells]] | None = None
        for tried in sorted(sizes):
            if best is not None and least_time + pads_time(costs, tried, n_mini) >= best[0]:
                break  # more rows cannot pay for their handling
            offered = zip(offers_M, rows_MD, strict=True)
            filled_M = [_fit_best(costs, cuts, least, rows_D, tried) for (cuts, least), rows_D in offered]
            time = sum(filled.time for filled in filled_M) + pads_time(costs, tried, n_mini)
            if best is None or time < best[0]:
                best = (time, filled_M)
        assert best is not None
        return best[1]


def _fit_best(
    costs: CallCosts,
    cuts: Sequence[Cut],
    least_time: int,
    rows_D: Sequence[Sequence[int]],
    size: int,
) -> FilledCells:
    """The best cut that fits into cells of ``size`` rows.

    Args:
        cuts: ways to cut the mini-batch, the best first.
        least_time: no way can beat it.
        rows_D: balanced cells of the mini-batch, which are cut if no way fits, or none fits well.
    """
    best: FilledCells | None = None
    for cut in cuts:
        if best is not None and cut.time >= best.time:
            break
        fitted = fit(costs, cut, size)
        if fitted is not None and (best is None or fitted.time < best.time):
            best = fitted
    # Balanced cells know nothing of chains.
    if best is None or (costs.chain_R is None and best.time > least_time + least_time // 64):
        balanced = cut_by_cell(costs, rows_D, size)
        if best is None or balanced.time < best.time:
            best = balanced
    return best


def ways_to_cut(
    costs: CallCosts, rows: Sequence[int], max_pairs: int, most_rows: int | None = None
) -> tuple[list[Cut], int]:
    """Good ways to cut a mini-batch for ranks that synchronize at each micro-batch.

    Args:
        rows: real rows of the mini-batch.
        max_pairs: how long to polish, in pairs of rows compared.
        most_rows: the most rows of a cell, and so of the part of a chain that stays together; None for any number.

    Returns:
        The ways, the best first, and a time that none can beat.
    """
    call = costs.call
    assert call.token_budget is not None
    # An item is a row; where chains are computed once, it is a chain, as long as its tip.
    rows_of_tip = _rows_of_tips(costs, rows, most_rows)
    by_length = costs.longest_first(list(rows_of_tip))
    rows_I = [rows_of_tip[tip] for tip in by_length.tolist()]
    packer = LevelPacker(costs, by_length)
    bound = micro_batch_bound(costs.tokens_R[by_length], costs.cost_R[by_length], call.dp_size, call.token_budget)
    n_polished = POLISHED if len(rows) <= LARGE else 1
    found = sorted(packer.candidates(bound), key=packer.time)[:n_polished]
    polished = [packer.polish(levels, bound, max_pairs // n_polished) for levels in found]
    cuts = [
        Cut(
            rows_DK=[
                [[row for item in items for row in rows_I[item]] for items in bins_K]
                for bins_K in _assign_ranks(levels, packer.cost_I, [len(rows) for rows in rows_I], call.dp_size)
            ],
            time=packer.time(levels),
        )
        for levels in sorted(polished, key=packer.time)
    ]
    least_levels = -(-sum(packer.tokens_I) // (call.token_budget * call.dp_size))
    return cuts, bound + least_levels * costs.level


def _rows_of_tips(costs: CallCosts, rows: Sequence[int], most_rows: int | None) -> dict[int, list[int]]:
    """The rows of each item by the longest of them, which comes first: a row alone, or a chain.

    A chain of more than ``most_rows`` rows is cut, the shortest rows into a part of their own.
    """
    if costs.chain_R is None:
        return {row: [row] for row in rows}
    found = {}
    for chain in members_of_chains(rows, costs.chain_R, costs.tokens_R):
        falling = chain[::-1]
        most = most_rows or len(falling)
        for first in range(0, len(falling), most):
            found[falling[first]] = falling[first : first + most]
    return found


def _assign_ranks(levels: Levels, cost_I: Sequence[int], n_rows_I: Sequence[int], n_ranks: int) -> list[list[Bin]]:
    """Gives each rank a bin of each level; ranks with few rows so far get the bins with many.

    Args:
        n_rows_I: rows of each item.
    """
    bins_DK: list[list[Bin]] = [[] for _ in range(n_ranks)]
    standing = [(0, 0, rank) for rank in range(n_ranks)]
    for bins in levels.bins_KD:
        weighed = sorted(
            ((sum(n_rows_I[item] for item in items), sum(cost_I[item] for item in items)), items) for items in bins
        )
        standing.sort(reverse=True)
        for place, ((count, cost), items) in enumerate(weighed):
            items_before, cost_before, rank = standing[place]
            bins_DK[rank].append(items)
            standing[place] = (items_before + max(count, 1), cost_before + cost, rank)
    return bins_DK
