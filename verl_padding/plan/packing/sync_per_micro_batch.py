"""Cuts mini-batches into micro-batches by tokens, for ranks that synchronize at every one of them.

FSDP gathers parameters in each micro-batch, so ranks wait for each other in each. Micro-batch k of
all ranks is a *micro-step*, as high as the cost of its costliest bin. A mini-batch takes the sum of
the heights, and a little more for each micro-step. Two things keep that low: few micro-steps, and
bins of one micro-step that cost the same.

Rows of 900, 500, 400 and 100 tokens, two ranks and a budget of 1,000, with a cost of one a token:
900 beside 500 + 400 is the first micro-step, and 100 beside a pad would be the second. One
micro-step does: 900 + 100 beside 500 + 400.

Rows are packed into micro-steps first, whatever rank they will be on. Then ranks get a bin of each,
and then the pads find their places (:mod:`~verl_padding.plan.packing.pads`).
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
from verl_padding.plan.packing.bins import Bin, fill_bin, first_fit, spread
from verl_padding.plan.packing.cells import (
    balanced_cells,
    cut_by_cell,
    pads_time,
    up_to_multiple,
)
from verl_padding.plan.packing.cutter import MicroBatchCutter
from verl_padding.plan.packing.packing_units import PackingUnits, candidate_groupings
from verl_padding.plan.packing.pads import Cut, fit, min_rows_of

GOOD_ENOUGH = 64
"""One micro-step more than the fewest is tried if the time is over its bound by more than 1 /
GOOD_ENOUGH of it."""


class SyncPerMicroBatch(MicroBatchCutter):
    """The fastest cut of a mini-batch is changed as little as its cells require; where it does not
    fit into them, balanced cells are cut, without regard to shared tokens, which always fits."""

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return True

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        """Cuts with cells of the size that takes the least time: the smallest, those that the cut
        asks for, and some between, in steps that double."""
        cut = fastest_cut(costs, rows, size)
        sizes = {size} if size else _sizes_to_try(costs.call, cut, len(rows))
        best_time: float = inf
        for tried in sorted(sizes):
            pads = pads_time(costs, tried, len(rows))
            if cut.time + pads >= best_time:
                break  # more rows cannot pay for their handling
            filled = fit(costs, cut, tried)
            if filled is None:
                filled = cut_by_cell(costs, balanced_cells(costs, rows, tried)[1], tried)
            if filled.time + pads < best_time:
                best_time, best = filled.time + pads, filled
        return best


def _sizes_to_try(call: Call, cut: Cut, n_rows: int) -> set[int]:
    multiple, least = call.cell_multiple, call.min_cell_rows(n_rows)
    # The fullest rank needs 13 rows, an even share would be 9: 9, 10, 11, 13 and 14 are tried.
    needed = up_to_multiple(min_rows_of(cut.rows_DK), multiple)
    # Where rows leave no room for pads, a micro-batch of pads takes a place more on each rank.
    with_pads = needed + multiple
    steps = (with_pads - least) // multiple
    doubling = {least + (1 << step) // 2 * multiple for step in range(steps.bit_length() + 1)}
    return {needed, with_pads} | doubling


def fastest_cut(costs: CallCosts, rows: Sequence[int], cell_rows: int | None) -> Cut:
    """The fastest cut of a mini-batch, whatever number of rows its cells have.

    Args:
        rows: real rows of the mini-batch.
        cell_rows: rows of a cell, and so the most of a unit; None for any number.
    """
    best: Cut | None = None
    groupings = candidate_groupings(costs, rows, cell_rows)
    packers = [MicroStepPacker(costs, units) for units in groupings]
    for packer in sorted(packers, key=attrgetter("min_time")):
        if best is not None and packer.min_time >= best.time:
            break
        micro_steps = min(packer.candidates(), key=attrgetter("time"))
        bins_DK = packer.assign_ranks(micro_steps)
        rows_DK = [[packer.units.rows_of(held) for held in bins] for bins in bins_DK]
        # Units of a bin may share more.
        cut = Cut(rows_DK=rows_DK, time=costs.micro_steps_time(rows_DK))
        if best is None or cut.time < best.time:
            best = cut
    assert best is not None
    return best


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """Units of a mini-batch, by micro-step and bin: a rank's micro-batch, whose rank is not decided
    yet."""

    bins_KD: list[list[Bin]]
    """Bins of each micro-step; both micro-steps and the bins in them from costly to cheap."""
    height: int
    """Cost of the costliest bin, summed over the micro-steps."""
    time: int
    """The height, and the overhead of the micro-steps."""


class MicroStepPacker:
    """Packs the units of a mini-batch into micro-steps."""

    def __init__(self, costs: CallCosts, units: PackingUnits):
        call = costs.call
        assert call.token_budget is not None
        self.units, self.tokens_I, self.cost_I = units, units.tokens_I, units.cost_I
        self.n_ranks, self.token_budget = call.dp_size, call.token_budget
        self.multiple = call.micro_batch_multiple
        """The number of micro-steps is a multiple of it."""
        arrays = np.array(units.tokens_I, dtype=np.int64), np.array(units.cost_I, dtype=np.int64)
        self.bound = micro_batch_bound(*arrays, self.n_ranks, self.token_budget)
        """The least height there is; of runs of trees, whose cost a token may fall with their
        tokens, about that."""
        self.min_steps = -(-sum(self.tokens_I) // (self.token_budget * self.n_ranks))
        self.min_time = self.bound + self.min_steps * costs.micro_batch_overhead
        """A time that no cut can beat."""
        self._overhead = costs.micro_batch_overhead
        self._total = sum(self.cost_I)

    def candidates(self) -> Iterator[MicroSteps]:
        """Cuts into the fewest micro-steps that hold all units, or one more; and of bins that are
        filled to the brim one after another, which suits a few long rows."""
        # Any two of these bins hold more than a budget. With fewer than the ranks, some rank would
        # have no unit in any micro-step.
        if 2 * sum(self.tokens_I) > self.token_budget * self.n_ranks:
            bins = first_fit(self.tokens_I, self.cost_I, self.token_budget)
            if len(bins) >= self.n_ranks:
                yield self.group_into_micro_steps(bins)
        n_steps = up_to_multiple(self.min_steps or 1, self.multiple)
        # With a micro-step for each unit, all of them have room.
        while (micro_steps := self._pack(n_steps)) is None:
            n_steps += self.multiple
        yield micro_steps
        # One more may fit a few long rows better; many rows are packed well at once.
        if micro_steps.time > self.min_time + self.min_time // GOOD_ENOUGH:
            one_more = self._pack(n_steps + self.multiple)
            if one_more is not None:
                yield one_more

    def assign_ranks(self, micro_steps: MicroSteps) -> list[list[Bin]]:
        """Gives each rank a bin of each micro-step; ranks with few rows so far get the bins with
        many."""
        # Ranks with 5 and 3 rows so far, and bins of one and of four rows: 6 and 7 rows, not 9 and
        # 4. Fewer pads then level the counts.
        bins_DK: list[list[Bin]] = [[] for _ in range(self.n_ranks)]
        ranks_by_load = [(0, 0, rank) for rank in range(self.n_ranks)]
        for bins in micro_steps.bins_KD:
            weighed = sorted((self.units.n_rows(held), self._cost([held]), held) for held in bins)
            ranks_by_load.sort(reverse=True)
            for place, (n_rows, cost, held) in enumerate(weighed):
                rows_before, cost_before, rank = ranks_by_load[place]
                bins_DK[rank].append(held)
                ranks_by_load[place] = (rows_before + max(n_rows, 1), cost_before + cost, rank)
        return bins_DK

    def group_into_micro_steps(self, bins: list[Bin]) -> MicroSteps:
        """Groups bins into micro-steps so that the heights are least: neighbours by cost, one bin a
        rank.

        Bins without items fill the last micro-steps.
        """
        # Costs 9 7 6 2 on two ranks: 9 beside 7 and 6 beside 2, of heights 9 + 6. No other pairs
        # are lower: the third costliest is in some micro-step that is no lower than it.
        load_B = [self._cost([items]) for items in bins]
        costliest_first = sorted(range(len(bins)), key=lambda number: -load_B[number])
        n_steps = up_to_multiple(-(-len(bins) // self.n_ranks), self.multiple)
        ordered = [bins[number] for number in costliest_first]
        ordered += [[] for _ in range(n_steps * self.n_ranks - len(bins))]
        height = sum(load_B[number] for number in costliest_first[:: self.n_ranks])
        return MicroSteps(
            bins_KD=[
                ordered[first : first + self.n_ranks]
                for first in range(0, len(ordered), self.n_ranks)
            ],
            height=height,
            time=height + n_steps * self._overhead,
        )

    def _cost(self, bins: list[Bin]) -> int:
        return sum(self.cost_I[item] for items in bins for item in items)

    def _pack(self, n_steps: int) -> MicroSteps | None:
        """Packs into ``n_steps`` micro-steps: heavy ones, as high as their longest row, then light
        ones.

        A row costlier than the mean of the micro-steps makes its micro-step a heavy one. The other
        bins of it can be filled as high only with long rows, for many short ones exceed the token
        budget first. Light ones share out the rest evenly.
        """
        # Rows of 900, 500, 300, 200 and 100 tokens on one rank, a budget of 1,000, a cost of one a
        # token and three micro-steps: 900 is more than a third of 2,000, so it has a heavy one, to
        # which only 100 tokens more would fit, but these would make it higher. The rest is 1,100 in
        # two: 500 is less than the mean, and both are light, 500 + 100 and 300 + 200.
        heavy_bins: list[Bin] = []
        units = range(len(self.cost_I))
        left = list(reversed(units))
        rest, n_light = self._total, n_steps
        while n_light > 1 and left:
            height = self.cost_I[left[-1]]
            if height * n_light * self.n_ranks <= rest:
                break
            # One for each first, so that no rank is without an item while there are enough.
            bins: list[Bin] = [
                [left.pop()] if left and not heavy_bins else [] for _ in range(self.n_ranks)
            ]
            for items in bins:
                fill_bin(items, left, self.tokens_I, self.cost_I, self.token_budget, height)
            rest -= self._cost(bins)
            heavy_bins += bins
            n_light -= 1
        goal_B = [rest // (n_light * self.n_ranks)] * (n_light * self.n_ranks)
        light_bins = spread(left[::-1], self.tokens_I, self.cost_I, goal_B, self.token_budget)
        if light_bins is not None:
            return self.group_into_micro_steps(heavy_bins + light_bins)
        # Long rows that fill heavy bins to the brim may leave the others too little room.
        goal_B = [0] * (n_steps * self.n_ranks)
        all_bins = spread(units, self.tokens_I, self.cost_I, goal_B, self.token_budget)
        return None if all_bins is None else self.group_into_micro_steps(all_bins)
