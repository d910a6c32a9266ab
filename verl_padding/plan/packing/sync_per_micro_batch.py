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
from verl_padding.plan.packing.bins import Bin, fill, first_fit, spread
from verl_padding.plan.packing.cells import (
    balanced_cells,
    cut_by_cell,
    pads_time,
    up_to_multiple,
)
from verl_padding.plan.packing.cutter import MicroBatchCutter
from verl_padding.plan.packing.packing_units import PackingUnits, candidate_groupings
from verl_padding.plan.packing.pads import Cut, fit, min_rows_of

HUGE = 16384
"""In a mini-batch with more rows, a way to group rows is not tried if another one is faster than it
could be, unless rows that share met by chance."""


class SyncPerMicroBatch(MicroBatchCutter):
    """There are several ways to cut a mini-batch, and the rows of its cells decide which fit.

    Cutting balanced cells always fits.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return True

    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        """Cuts with cells of the size that takes the least time: the smallest, those that the cuts
        ask for, and some between, in steps that double."""
        cuts = candidate_cuts(costs, rows, size)
        sizes = {size} if size else _sizes_to_try(costs.call, cuts, len(rows))
        quickest = cuts[0].time
        best_time: float = inf
        for tried in sorted(sizes):
            pads = pads_time(costs, tried, len(rows))
            if quickest + pads >= best_time:
                break  # more rows cannot pay for their handling
            filled = _fit_best(costs, cuts, rows, tried)
            if filled.time + pads < best_time:
                best_time, best = filled.time + pads, filled
        return best


def _sizes_to_try(call: Call, cuts: Sequence[Cut], n_rows: int) -> set[int]:
    multiple, least = call.cell_multiple, call.min_cell_rows(n_rows)
    needed = {up_to_multiple(min_rows_of(cut.rows_DK), multiple) for cut in cuts}
    # Where rows leave no room for pads, a micro-batch of pads takes a place more on each rank.
    needed |= {size + multiple for size in needed}
    steps = (max(needed) - least) // multiple
    return needed | {least + (1 << step) // 2 * multiple for step in range(steps.bit_length() + 1)}


def _fit_best(costs: CallCosts, cuts: Sequence[Cut], rows: Sequence[int], size: int) -> Cut:
    """The best cut that fits into cells of ``size`` rows; if none does, balanced cells are cut,
    without regard to shared tokens.

    Args:
        cuts: of the mini-batch, the best first.
        rows: real rows of the mini-batch.
    """
    best: Cut | None = None
    for cut in cuts:
        if best is not None and cut.time >= best.time:
            break
        fitted = fit(costs, cut, size)
        if fitted is not None and (best is None or fitted.time < best.time):
            best = fitted
    return best or cut_by_cell(costs, balanced_cells(costs, rows, size)[1], size)


def candidate_cuts(costs: CallCosts, rows: Sequence[int], cell_rows: int | None) -> list[Cut]:
    """Good cuts of a mini-batch, the best first.

    Args:
        rows: real rows of the mini-batch.
        cell_rows: rows of a cell, and so the most of a unit; None for any number.
    """
    cuts: list[Cut] = []
    packers = [
        MicroStepPacker(costs, items) for items in candidate_groupings(costs, rows, cell_rows)
    ]
    for packer in sorted(packers, key=attrgetter("min_time")):
        if (
            cuts
            and costs.n_rows > HUGE
            and cell_rows is None
            and packer.min_time >= min(cut.time for cut in cuts)
        ):
            break
        micro_steps = min(packer.candidates(), key=attrgetter("time"))
        bins_DK = packer.assign_ranks(micro_steps)
        rows_DK = [[packer.items.rows_of(of_bin) for of_bin in bins] for bins in bins_DK]
        time = micro_steps.time
        if len(packers) > 1:  # items of a bin may share more
            _, load_DK = costs.micro_batch_loads(rows_DK)
            time = (
                int(load_DK.max(axis=0).sum())
                + len(micro_steps.bins_KD) * costs.micro_batch_overhead
            )
        cuts.append(Cut(rows_DK=rows_DK, time=time))
    return sorted(cuts, key=attrgetter("time"))


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
    """Packs the items of a mini-batch into micro-steps."""

    def __init__(self, costs: CallCosts, items: PackingUnits):
        call = costs.call
        assert call.token_budget is not None
        self.items, self.tokens_I, self.cost_I = items, items.tokens_I, items.cost_I
        self.n_ranks, self.token_budget = call.dp_size, call.token_budget
        self.multiple = call.micro_batch_multiple
        """The number of micro-steps is a multiple of it."""
        arrays = np.array(items.tokens_I, dtype=np.int64), np.array(items.cost_I, dtype=np.int64)
        self.bound = micro_batch_bound(*arrays, self.n_ranks, self.token_budget)
        """The least height there is; of runs of trees, whose cost a token may fall with their
        tokens, about that."""
        self.min_steps = -(-sum(self.tokens_I) // (self.token_budget * self.n_ranks))
        self.min_time = self.bound + self.min_steps * costs.micro_batch_overhead
        """A time that no cut can beat."""
        self._overhead = costs.micro_batch_overhead
        self._total = sum(self.cost_I)

    def candidates(self) -> Iterator[MicroSteps]:
        """Cuts into micro-steps: of bins that are filled to the brim one after another, and into
        the fewest micro-steps that hold all units, or one more."""
        if len(self.tokens_I) >= self.n_ranks:
            bins = first_fit(self.tokens_I, self.cost_I, self.token_budget)
            if len(bins) >= self.n_ranks:  # else some rank would have no unit in any micro-step
                yield self.group_into_micro_steps(bins)
        n_steps = up_to_multiple(self.min_steps or 1, self.multiple)
        # With a micro-step for each unit, all of them have room.
        while (micro_steps := self._pack(n_steps)) is None:
            n_steps += self.multiple
        yield micro_steps
        # One more may fit a few long rows better; many rows are packed well at once.
        if micro_steps.time > self.min_time + self.min_time // 64:
            one_more = self._pack(n_steps + self.multiple)
            if one_more is not None:
                yield one_more

    def assign_ranks(self, micro_steps: MicroSteps) -> list[list[Bin]]:
        """Gives each rank a bin of each micro-step; ranks with few rows so far get the bins with
        many."""
        bins_DK: list[list[Bin]] = [[] for _ in range(self.n_ranks)]
        ranks_by_load = [(0, 0, rank) for rank in range(self.n_ranks)]
        for bins in micro_steps.bins_KD:
            weighed = sorted((self.items.n_rows(held), self._cost([held]), held) for held in bins)
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
        heavy_bins: list[Bin] = []
        left = list(reversed(range(len(self.cost_I))))
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
                fill(items, left, self.tokens_I, self.cost_I, self.token_budget, height)
            rest -= self._cost(bins)
            heavy_bins += bins
            n_light -= 1
        goal_B = [rest // (n_light * self.n_ranks)] * (n_light * self.n_ranks)
        light_bins = spread(left[::-1], self.tokens_I, self.cost_I, goal_B, self.token_budget)
        if light_bins is not None:
            return self.group_into_micro_steps(heavy_bins + light_bins)
        # Long rows that fill heavy bins to the brim may leave the others too little room.
        n_bins = n_steps * self.n_ranks
        all_bins = spread(
            range(len(self.cost_I)), self.tokens_I, self.cost_I, [0] * n_bins, self.token_budget
        )
        return None if all_bins is None else self.group_into_micro_steps(all_bins)
