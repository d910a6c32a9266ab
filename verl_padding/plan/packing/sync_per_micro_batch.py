"""Cuts mini-batches into micro-batches by tokens, for ranks that synchronize at every one of them,
and wherever rows share.

FSDP gathers parameters in each micro-batch, so ranks wait for each other in each. Micro-batch k of
all ranks is a *micro-step*; its *makespan* is the cost of its costliest bin. A mini-batch takes the
sum of the makespans, and a little more for each micro-step. Two things keep that low: few
micro-steps, and bins of one micro-step that cost the same.

Rows of 900, 500, 400 and 100 tokens, two ranks and a budget of 1,000, with a cost of one a token:
900 beside 500 + 400 is the first micro-step, and 100 beside a pad would be the second. One
micro-step does: 900 + 100 beside 500 + 400.

Rows are packed into micro-steps first, whatever rank they will be on. Then ranks get a bin of each,
and then the pads find their places (:mod:`~verl_padding.plan.packing.pad_places`).

A *unit* is packed as one: a row, or a run of rows of a trie. Where rows share their beginnings, a
bin should hold rows that share much; but a whole trie may be more than a bin holds, or more than an
even share. So the rows of each trie, in order, are cut into runs, each filled up to a goal and cut
where least is shared. Small runs balance better, large ones share more, and how the two add up is
seen when they are packed: several goals are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s, up_to_multiple
from verl_padding.plan.layout import RowsDK
from verl_padding.plan.packing.bins import Bin, fill_bin, spread
from verl_padding.plan.packing.pad_places import fit, rows_needed
from verl_padding.plan.prefix_tries import MIN_SHARED_TOKENS, cached_tokens

MicroSteps = list[list[Bin]]
"""Units of a mini-batch, by micro-step and bin: a rank's micro-batch, whose rank is not decided
yet. Both micro-steps and the bins in them come from costly to cheap."""
GOALS = (2.0, 1.0, 1 / 2)
"""Maximum cost of a run, as a multiple of a bin's even share; where rows branch, each is tried."""
MAX_CUT_BACK = 2
"""A run may end early where less is shared, by 1 / MAX_CUT_BACK of its cost at most."""
MAX_GATHERED_TOKENS_RATIO = 8
"""Tokens of all rows of a micro-batch, over its token budget, at most: keys and values are gathered
for each row."""


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
    cut = min((units.cut() for units in groupings), key=costs.step_time)
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


@dataclass(frozen=True, kw_only=True)
class PackingUnits:
    """The units of a mini-batch, the costliest first."""

    costs: CallCosts
    rows_I: list[list[int]]
    """Rows of each."""
    tokens_I: list[int]
    """What each takes of a token budget, no less than those behind it: where two are about as
    costly, a little more."""
    cost_I: list[int]

    @classmethod
    def from_rows(cls, costs: CallCosts, rows: Sequence[int]) -> PackingUnits:
        """Each row by itself."""
        by_length = costs.longest_first(rows)
        return cls(
            costs=costs,
            rows_I=by_length[:, None].tolist(),
            tokens_I=costs.tokens_R[by_length].tolist(),
            cost_I=costs.cost_R[by_length].tolist(),
        )

    def cut(self) -> RowsDK:
        """The rows by rank and micro-batch: ranks with few rows so far get the bins with many."""
        # Ranks with 5 and 3 rows so far, and bins of one and of four rows: 6 and 7 rows, not 9 and
        # 4. Fewer pads then level the counts.
        ranks = range(self.costs.call.dp_size)
        rows_DK: list[list[list[int]]] = [[] for _ in ranks]
        loads = [(0, 0, rank) for rank in ranks]
        for bins in self.micro_steps():
            held = [[row for unit in units for row in self.rows_I[unit]] for units in bins]
            weighed = sorted(zip(map(len, held), map(self._cost, bins), bins, held, strict=True))
            loads.sort(reverse=True)
            for place, (n_rows, cost, _, rows) in enumerate(weighed):
                rows_before, cost_before, rank = loads[place]
                rows_DK[rank].append(rows)
                loads[place] = (rows_before + max(n_rows, 1), cost_before + cost, rank)
        return rows_DK

    def micro_steps(self) -> MicroSteps:
        """As few micro-steps as are found to hold all units."""
        call = self.costs.call
        fewest = -(-sum(self.tokens_I) // (self.costs.token_budget * call.dp_size))
        n_steps = up_to_multiple(fewest, call.micro_batch_multiple)
        # With a micro-step for each unit, all of them have room.
        while (found := self._pack(n_steps)) is None:
            n_steps += call.micro_batch_multiple
        return found

    def group_into_micro_steps(self, bins: list[Bin]) -> MicroSteps:
        """Groups bins into micro-steps so that the makespans are least: neighbours by cost, one bin
        a rank."""
        # Costs 9 7 6 2 on two ranks: 9 beside 7 and 6 beside 2, of makespans 9 + 6. No other pairs
        # are lower: the third costliest is in some micro-step that is no lower than it.
        costliest_first = sorted(bins, key=self._cost, reverse=True)
        n_ranks = self.costs.call.dp_size
        firsts = range(0, len(bins), n_ranks)
        return [costliest_first[first : first + n_ranks] for first in firsts]

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
        n_ranks, budget = self.costs.call.dp_size, self.costs.token_budget
        heavy_bins: list[Bin] = []
        units = range(len(self.cost_I))
        left = list(reversed(units))
        rest, n_light = sum(self.cost_I), n_steps
        while n_light > 1 and left:
            makespan = self.cost_I[left[-1]]
            if makespan * n_light * n_ranks <= rest:
                break
            # One for each first, so that no rank is without an item while there are enough.
            bins: list[Bin] = [
                [left.pop()] if left and not heavy_bins else [] for _ in range(n_ranks)
            ]
            for items in bins:
                fill_bin(items, left, self.tokens_I, self.cost_I, budget, makespan)
            rest -= sum(map(self._cost, bins))
            heavy_bins += bins
            n_light -= 1
        goal_B = [rest // (n_light * n_ranks)] * (n_light * n_ranks)
        light_bins = spread(left[::-1], self.tokens_I, self.cost_I, goal_B, budget)
        # Long rows that fill heavy bins to the brim may leave the others too little room.
        return None if light_bins is None else self.group_into_micro_steps(heavy_bins + light_bins)


def candidate_groupings(
    costs: CallCosts, rows: Sequence[int], max_rows: int | None
) -> list[PackingUnits]:
    """The rows of a mini-batch as units: each by itself, or runs of the rows of its tries, in
    several sizes.

    Args:
        max_rows: the most rows of a unit; None for any number.
    """
    if costs.tries is None or max_rows == 1:
        return [PackingUnits.from_rows(costs, rows)]
    numbers, n_ranks = np.array(rows, dtype=np.int64), costs.call.dp_size
    order, shared_I = costs.tries.shared_among(numbers)
    in_order = numbers[order]
    tokens, _, cost = (int(load.sum()) for load in costs.micro_batch_loads([[rows]]))
    n_bins = n_ranks * -(-tokens // (costs.token_budget * n_ranks))
    branches_I = (shared_I >= MIN_SHARED_TOKENS) & (shared_I < costs.tokens_R[in_order])
    # A row and its full prefixes cost what it costs alone: such a run is never too costly.
    min_limit = int(costs.cost_R[numbers].max())
    return [
        cut_runs(
            costs,
            in_order,
            shared_I,
            max_rows=max_rows or len(rows),
            max_cost=max(int(goal * cost / n_bins), min_limit),
        )
        for goal in (GOALS if branches_I.any() else GOALS[:1])
    ]


class _LimitedSum:
    """A sum over the rows of a run, and its limit: of tokens, of cost, or of what else is bounded.

    The first row of a run adds all that it has, each other what it does not share with the row
    before. With prefix sums, the sum of a run is one difference: rows of 100, 90 and 80 tokens that
    add 100, 31 and 61 have the prefix sums 0, 100, 131 and 192, and start at 0, 41 and 112; the run
    of the last two has 192 - 41 = 90 + 61.

    Args:
        added_I: what each row adds behind the row before it.
        alone_I: what it adds as the first row of a run.
        limit: maximum of a run's sum.
    """

    def __init__(self, added_I: Int64s, alone_I: Int64s, limit: int):
        self.prefix_sums = np.append(0, np.cumsum(added_I))
        self._start_I = self.prefix_sums[1:] - alone_I
        self._limit = limit

    def longest_run_ends(self) -> Int64s:
        """Where the longest run that begins at each place ends."""
        return np.searchsorted(self.prefix_sums, self._start_I + self._limit, side="right") - 1

    def run_sums(self, first_I: Int64s, end_I: Int64s) -> Int64s:
        """The sum of each run."""
        return self.prefix_sums[end_I] - self._start_I[first_I]


def cut_runs(
    costs: CallCosts, rows: Int64s, shared_I: Int64s, *, max_rows: int, max_cost: int
) -> PackingUnits:
    """Runs of rows in the order of their tries, each as long as budget, cost and number of rows
    allow.

    Args:
        shared_I: tokens that each row shares with the one before it.
    """
    # Rows of 100, 90, 80 and 70 tokens share 0, 60, 20 and 50 with the one before: behind it they
    # take 100, 31, 61 and 21. With a budget of 200, the first three (192) fit into a run. But the
    # third shares little with the second, and the first two are more than half of the run, so it
    # is cut there: runs of 131 tokens, and of 80 + 21.
    budget, places = costs.token_budget, np.arange(len(rows))
    assert costs.tries is not None
    length_I = costs.tokens_R[rows]
    is_whole_I = shared_I == length_I
    start_I = cached_tokens(shared_I, length_I)
    may_branch_I = (start_I > 0) & costs.tries.has_branches
    used_I = np.where(is_whole_I, 0, costs.used_by_rows(length_I - start_I, may_branch_I))
    # The first row of a run may branch off rows of another run that comes into its bin.
    used = _LimitedSum(used_I, costs.used_by_rows(length_I, may_branch_I), budget)
    cost = _LimitedSum(costs.suffix_cost(rows, start_I), costs.cost_R[rows], max_cost)
    gathered = _LimitedSum(
        np.where(is_whole_I, 0, length_I), length_I, MAX_GATHERED_TOKENS_RATIO * budget
    )
    bounds = np.append(np.flatnonzero(start_I == 0), len(rows))
    trie_end_I = bounds[np.searchsorted(bounds, places, side="right")]
    ends = [limited.longest_run_ends() for limited in (used, cost, gathered)]
    max_end_I = np.maximum(np.minimum.reduce([*ends, places + max_rows, trie_end_I]), places + 1)
    first_J = _first_places(cost, max_end_I, shared_I)
    end_J = np.append(first_J[1:], len(rows))
    cost_J = cost.run_sums(first_J, end_J)
    # A run takes as much of the budget as the larger of two needs: what it computes and keeps, and
    # the memory of gathered keys and values.
    gathered_J = -(-gathered.run_sums(first_J, end_J) // MAX_GATHERED_TOKENS_RATIO)
    tokens_J = np.maximum(used.run_sums(first_J, end_J), gathered_J)
    order = np.lexsort((-tokens_J, -cost_J))
    # Bins expect falling tokens: each takes as many as the largest behind it.
    falling_tokens_J = np.maximum.accumulate(tokens_J[order][::-1])[::-1]
    return PackingUnits(
        costs=costs,
        rows_I=[rows[first_J[run] : end_J[run]].tolist() for run in order],
        tokens_I=np.minimum(falling_tokens_J, budget).tolist(),
        cost_I=cost_J[order].tolist(),
    )


def _first_places(cost: _LimitedSum, max_end_I: Int64s, shared_I: Int64s) -> Int64s:
    """Where runs begin. A run from place i ends at ``max_end_I[i]``, or where less is shared,
    :data:`MAX_CUT_BACK` permitting: where the next row shares least with the row before, and at the
    last of several such places."""
    places = np.arange(len(max_end_I))
    enough_I = cost.prefix_sums[max_end_I] - cost.run_sums(places, max_end_I) // MAX_CUT_BACK
    min_end_I = np.maximum(np.searchsorted(cost.prefix_sums, enough_I), places + 1)
    shared, firsts, place = [*shared_I.tolist(), 0], [], 0
    while place < len(places):
        firsts.append(place)
        ends = range(max_end_I[place], min_end_I[place] - 1, -1)
        place = min(ends, key=shared.__getitem__)
    return np.array(firsts, dtype=np.int64)
