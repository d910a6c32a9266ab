"""Cuts mini-batches into micro-batches by tokens, for ranks that synchronize at every one of them,
and wherever rows share.

FSDP gathers parameters in each micro-batch, so ranks wait for each other in each. Micro-batch k of
all ranks is a *micro-step*, as high as the cost of its costliest bin. A mini-batch takes the sum of
the makespans, and a little more for each micro-step. Two things keep that low: few micro-steps, and
bins of one micro-step that cost the same.

Rows of 900, 500, 400 and 100 tokens, two ranks and a budget of 1,000, with a cost of one a token:
900 beside 500 + 400 is the first micro-step, and 100 beside a pad would be the second. One
micro-step does: 900 + 100 beside 500 + 400.

Rows are packed into micro-steps first, whatever rank they will be on. Then ranks get a bin of each,
and then the pads find their places (:mod:`~verl_padding.plan.packing.pad_places`).
"""

from collections.abc import Sequence
from math import inf

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.layout import RowsDK
from verl_padding.plan.packing.bins import Bin, fill_bin, spread
from verl_padding.plan.packing.packing_units import PackingUnits, candidate_groupings
from verl_padding.plan.packing.pad_places import fit, rows_needed

MicroSteps = list[list[Bin]]
"""Units of a mini-batch, by micro-step and bin: a rank's micro-batch, whose rank is not decided
yet. Both micro-steps and the bins in them come from costly to cheap."""


def cut_micro_steps(
    costs: CallCosts, rows: Sequence[int], size: int | None, best: RowsDK | None = None
) -> RowsDK:
    """The fastest cut of a mini-batch, changed as little as its local mini-batches require: they
    are as small as can be, or larger, up to those that the cut asks for, if that is faster.

    Args:
        best: local mini-batches that are taken unless these are faster.
    """
    # Units of a bin may share more, which the time of a cut has and that of units has not.
    groupings, call = candidate_groupings(costs, rows, size), costs.call
    cut = min((MicroStepPacker(costs, units).cut() for units in groupings), key=costs.step_time)
    min_time, best_time = costs.step_time(cut), inf if best is None else costs.step_time(best)
    # An even share is 9 rows, the fullest rank needs 13: 9, 10, 12 and 13 are tried.
    needed = size or up_to_multiple(max(map(rows_needed, cut)), call.local_batch_multiple)
    tried, more = size or call.min_local_batch_rows(len(rows)), call.local_batch_multiple
    # More pads than these cannot pay for their handling.
    while min_time + (tried * call.dp_size - len(rows)) * costs.pad_handling < best_time:
        filled = fit(costs, cut, tried)
        if (time := costs.step_time(filled)) < best_time:
            best, best_time = filled, time
        if tried == needed:
            break
        tried, more = min(tried + more, needed), 2 * more
    assert best is not None
    return best


class MicroStepPacker:
    """Packs the units of a mini-batch into micro-steps."""

    def __init__(self, costs: CallCosts, units: PackingUnits):
        call = costs.call
        self.units, self.tokens_I, self.cost_I = units, units.tokens_I, units.cost_I
        self.n_ranks, self.token_budget = call.dp_size, costs.token_budget
        self.multiple = call.micro_batch_multiple
        """The number of micro-steps is a multiple of it."""

    def cut(self) -> RowsDK:
        """The rows by rank and micro-batch: ranks with few rows so far get the bins with many."""
        # Ranks with 5 and 3 rows so far, and bins of one and of four rows: 6 and 7 rows, not 9 and
        # 4. Fewer pads then level the counts.
        rows_DK: list[list[list[int]]] = [[] for _ in range(self.n_ranks)]
        loads = [(0, 0, rank) for rank in range(self.n_ranks)]
        for bins in self.micro_steps():
            held = [[row for unit in units for row in self.units.rows_I[unit]] for units in bins]
            weighed = sorted(zip(map(len, held), map(self._cost, bins), bins, held, strict=True))
            loads.sort(reverse=True)
            for place, (n_rows, cost, _, rows) in enumerate(weighed):
                rows_before, cost_before, rank = loads[place]
                rows_DK[rank].append(rows)
                loads[place] = (rows_before + max(n_rows, 1), cost_before + cost, rank)
        return rows_DK

    def micro_steps(self) -> MicroSteps:
        """The fewest micro-steps that hold all units."""
        fewest = -(-sum(self.tokens_I) // (self.token_budget * self.n_ranks))
        n_steps = up_to_multiple(fewest, self.multiple)
        # With a micro-step for each unit, all of them have room.
        while (found := self._pack(n_steps)) is None:
            n_steps += self.multiple
        return found

    def group_into_micro_steps(self, bins: list[Bin]) -> MicroSteps:
        """Groups bins into micro-steps so that the makespans are least: neighbours by cost, one bin
        a rank."""
        # Costs 9 7 6 2 on two ranks: 9 beside 7 and 6 beside 2, of makespans 9 + 6. No other pairs
        # are lower: the third costliest is in some micro-step that is no lower than it.
        costliest_first = sorted(bins, key=self._cost, reverse=True)
        firsts = range(0, len(bins), self.n_ranks)
        return [costliest_first[first : first + self.n_ranks] for first in firsts]

    def _cost(self, units: Bin) -> int:
        return sum(self.cost_I[unit] for unit in units)

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
        rest, n_light = sum(self.cost_I), n_steps
        while n_light > 1 and left:
            makespan = self.cost_I[left[-1]]
            if makespan * n_light * self.n_ranks <= rest:
                break
            # One for each first, so that no rank is without an item while there are enough.
            bins: list[Bin] = [
                [left.pop()] if left and not heavy_bins else [] for _ in range(self.n_ranks)
            ]
            for items in bins:
                fill_bin(items, left, self.tokens_I, self.cost_I, self.token_budget, makespan)
            rest -= sum(map(self._cost, bins))
            heavy_bins += bins
            n_light -= 1
        goal_B = [rest // (n_light * self.n_ranks)] * (n_light * self.n_ranks)
        light_bins = spread(left[::-1], self.tokens_I, self.cost_I, goal_B, self.token_budget)
        # Long rows that fill heavy bins to the brim may leave the others too little room.
        return None if light_bins is None else self.group_into_micro_steps(heavy_bins + light_bins)
