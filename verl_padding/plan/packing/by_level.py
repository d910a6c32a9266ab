"""Cuts mini-batches into micro-batches by tokens, for ranks that synchronize at every one of them.

FSDP gathers parameters in each micro-batch, so ranks wait for each other in each. Micro-batch k of all ranks is a
level, whose height is the cost of its costliest bin; a mini-batch takes the sum of the heights, and a little more for
each level. Two things keep that low: few levels, and bins of one level that cost the same. Rows are packed into levels
first, whatever rank they will be on, then ranks get a bin of each level, and then the pads find their places
(:mod:`~verl_padding.plan.packing.pads`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.calls import Call
from verl_padding.plan.job import Packer
from verl_padding.plan.lower_bounds import micro_batch_bound
from verl_padding.plan.packing.bins import Bin, fill, first_fit, spread
from verl_padding.plan.packing.cells import (
    balanced_cells,
    cut_by_cell,
    pads_time,
    up_to_multiple,
)
from verl_padding.plan.packing.items import Items, ways_to_group
from verl_padding.plan.packing.pads import Cut, FilledCells, fit, least_rows
from verl_padding.plan.packing.way import Way

MORE_LEVELS = 3
"""How many larger numbers of levels are tried than the least: one more costs its handling, but may fit rows better."""
HUGE = 16384
"""In a mini-batch with more rows, a way to group rows is not tried if another one is faster than it could be, unless
rows that share met by chance."""


class ByLevel(Way):
    """A mini-batch may be cut in several ways, and the rows of its cells decide which fit.

    Cutting balanced cells always fits.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return True

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> FilledCells:
        """Cuts with cells of the size that takes the least time: the smallest, those that the cuts ask for, and some
        between, in steps that double."""
        cuts, least_time = ways_to_cut(costs, rows, size)
        sizes = {size} if size else _sizes_to_try(costs.call, cuts, len(rows))
        quickest = cuts[0].time
        best_time: float = inf
        for tried in sorted(sizes):
            pads = pads_time(costs, tried, len(rows))
            if quickest + pads >= best_time:
                break  # more rows cannot pay for their handling
            filled = _fit_best(costs, cuts, least_time, rows, tried)
            if filled.time + pads < best_time:
                best_time, best = filled.time + pads, filled
        return best


def _sizes_to_try(call: Call, cuts: Sequence[Cut], n_rows: int) -> set[int]:
    multiple, least = call.cell_multiple, call.min_cell_rows(n_rows)
    needed = {up_to_multiple(least_rows(cut.rows_DK), multiple) for cut in cuts}
    # Where rows leave no room for pads, a micro-batch of pads takes a place more on each rank.
    needed |= {size + multiple for size in needed}
    steps = (max(needed) - least) // multiple
    return needed | {least + (1 << step) // 2 * multiple for step in range(steps.bit_length() + 1)}


def _fit_best(costs: CallCosts, cuts: Sequence[Cut], least_time: int, rows: Sequence[int], size: int) -> FilledCells:
    """The best cut that fits into cells of ``size`` rows; if none fits, or none fits well, balanced cells are cut.

    Args:
        cuts: ways to cut the mini-batch, the best first; none can beat ``least_time``.
        rows: real rows of the mini-batch.
    """
    best: FilledCells | None = None
    for cut in cuts:
        if best is not None and cut.time >= best.time:
            break
        fitted = fit(costs, cut, size)
        if fitted is not None and (best is None or fitted.time < best.time):
            best = fitted
    # Balanced cells know nothing of chains.
    if best is None or (costs.forest is None and best.time > least_time + least_time // 64):
        balanced = cut_by_cell(costs, balanced_cells(costs, rows, size)[1], size)
        if best is None or balanced.time < best.time:
            best = balanced
    return best


def ways_to_cut(costs: CallCosts, rows: Sequence[int], cell_rows: int | None) -> tuple[list[Cut], int]:
    """Good ways to cut a mini-batch, the best first, and a time that none can beat.

    Args:
        rows: real rows of the mini-batch.
        cell_rows: rows of a cell, and so the most of an item; None for any number.
    """
    cuts: list[Cut] = []
    ways = [LevelPacker(costs, items) for items in ways_to_group(costs, rows, cell_rows)]
    for packer in sorted(ways, key=attrgetter("least_time")):
        if cuts and costs.n_rows > HUGE and cell_rows is None and packer.least_time >= min(cut.time for cut in cuts):
            break
        levels = min(packer.candidates(), key=attrgetter("time"))
        bins_DK = packer.assign_ranks(levels)
        rows_DK = [[packer.items.rows_of(of_bin) for of_bin in bins] for bins in bins_DK]
        time = levels.time
        if len(ways) > 1:  # items of a bin may share more
            _, load_DK = costs.sums(rows_DK)
            time = int(load_DK.max(axis=0).sum()) + len(levels.bins_KD) * costs.level
        cuts.append(Cut(rows_DK=rows_DK, time=time))
    return sorted(cuts, key=attrgetter("time")), min(packer.least_time for packer in ways)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Items of a mini-batch, by level and bin; a bin is a rank's micro-batch, but which rank's is not yet decided."""

    bins_KD: list[list[Bin]]
    """Bins of each level; both levels and the bins in them from costly to cheap."""
    height: int
    """Cost of the costliest bin, summed over the levels."""
    time: int
    """The height, and the handling of the levels."""


class LevelPacker:
    """Packs the items of a mini-batch into levels."""

    def __init__(self, costs: CallCosts, items: Items):
        call = costs.call
        assert call.token_budget is not None
        self.items, self.tokens_I, self.cost_I = items, items.tokens_I, items.cost_I
        self.n_ranks, self.token_budget = call.dp_size, call.token_budget
        self.multiple = call.micro_batch_multiple
        """The number of levels is a multiple of it."""
        arrays = np.array(items.tokens_I, dtype=np.int64), np.array(items.cost_I, dtype=np.int64)
        self.bound = micro_batch_bound(*arrays, self.n_ranks, self.token_budget)
        """The least height there is; of runs of trees, whose cost a token may fall with their tokens, about that."""
        # A search takes time with the items, and many of them are packed well at the first attempt.
        self.goal = self.bound + self.bound * min(max(len(items), 1 << 11), 1 << 14) // (1 << 21)
        """Height at which a search may end: a thousandth above the bound, up to a hundredth for many thousand items."""
        self.least_levels = -(-sum(self.tokens_I) // (self.token_budget * self.n_ranks))
        self.least_time = self.bound + self.least_levels * costs.level
        """A time that no cut can beat."""
        self._handling = costs.level
        self._total = sum(self.cost_I)

    def candidates(self) -> Iterator[Levels]:
        """Good ways to cut the levels, until one is good enough."""
        if len(self.tokens_I) >= self.n_ranks:
            bins = first_fit(self.tokens_I, self.cost_I, self.token_budget)
            if len(bins) >= self.n_ranks:  # else some rank would have no item in any level
                yield self.levels_of(bins)
        least, most = up_to_multiple(self.least_levels or 1, self.multiple), len(self.tokens_I) + self.multiple
        best_time, successes = inf, 0
        for n_levels in range(least, most + 1, self.multiple):
            if successes > MORE_LEVELS or self.bound + n_levels * self._handling >= best_time:
                return  # not even a perfect cut into so many levels would be better
            levels = self._pack(n_levels)
            if levels is None:
                continue
            yield levels
            if levels.height <= self.goal:
                return
            best_time = min(best_time, levels.time)
            successes += 1

    def assign_ranks(self, levels: Levels) -> list[list[Bin]]:
        """Gives each rank a bin of each level; ranks with few rows so far get the bins with many."""
        bins_DK: list[list[Bin]] = [[] for _ in range(self.n_ranks)]
        standing = [(0, 0, rank) for rank in range(self.n_ranks)]
        for bins in levels.bins_KD:
            weighed = sorted((self.items.n_rows(held), self._cost([held]), held) for held in bins)
            standing.sort(reverse=True)
            for place, (n_rows, cost, held) in enumerate(weighed):
                rows_before, cost_before, rank = standing[place]
                bins_DK[rank].append(held)
                standing[place] = (rows_before + max(n_rows, 1), cost_before + cost, rank)
        return bins_DK

    def levels_of(self, bins: list[Bin]) -> Levels:
        """Groups bins into levels so that the heights are least: neighbours by cost, one bin a rank.

        Bins without items fill the last levels.
        """
        load_B = [self._cost([items]) for items in bins]
        costliest_first = sorted(range(len(bins)), key=lambda number: -load_B[number])
        n_levels = up_to_multiple(-(-len(bins) // self.n_ranks), self.multiple)
        ordered = [bins[number] for number in costliest_first]
        ordered += [[] for _ in range(n_levels * self.n_ranks - len(bins))]
        height = sum(load_B[number] for number in costliest_first[:: self.n_ranks])
        return Levels(
            bins_KD=[ordered[first : first + self.n_ranks] for first in range(0, len(ordered), self.n_ranks)],
            height=height,
            time=height + n_levels * self._handling,
        )

    def _cost(self, bins: list[Bin]) -> int:
        return sum(self.cost_I[item] for items in bins for item in items)

    def _pack(self, n_levels: int) -> Levels | None:
        """Packs into ``n_levels`` levels: heavy ones, as high as their longest row, then light ones of one height.

        A row costlier than the levels' mean makes its level a heavy one. The other bins of a heavy level can be
        filled as high as it only with long rows, for many short ones exceed the token budget first.
        """
        heavy_bins: list[Bin] = []
        left = list(reversed(range(len(self.cost_I))))
        rest, n_light = self._total, n_levels
        while n_light > 1 and left:
            height = self.cost_I[left[-1]]
            if height * n_light * self.n_ranks <= rest:
                break
            # One for each first, so that no rank is without an item while there are enough.
            bins: list[Bin] = [[left.pop()] if left and not heavy_bins else [] for _ in range(self.n_ranks)]
            for items in bins:
                fill(items, left, self.tokens_I, self.cost_I, self.token_budget, height)
            rest -= self._cost(bins)
            heavy_bins += bins
            n_light -= 1
        goal_B = [rest // (n_light * self.n_ranks)] * (n_light * self.n_ranks)
        light_bins = spread(left[::-1], self.tokens_I, self.cost_I, goal_B, self.token_budget)
        if light_bins is not None:
            return self.levels_of(heavy_bins + light_bins)
        # Long rows that fill heavy bins to the brim may leave the others too little room.
        n_bins = n_levels * self.n_ranks
        all_bins = spread(range(len(self.cost_I)), self.tokens_I, self.cost_I, [0] * n_bins, self.token_budget)
        return None if all_bins is None else self.levels_of(all_bins)
