"""What is packed as one: a row, or a run of rows of a trie.

Where rows share their beginnings, a bin should hold rows that share much; but a whole trie may be
more than a bin holds, or more than an even share. So the rows of each trie, in order, are cut into
runs, each filled up to a goal and cut where least is shared. Small runs balance better, large ones
share more, and how the two add up is seen when they are packed: several goals are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.prefix_tries import MIN_SHARED_TOKENS, cached_tokens

GOALS = (2.0, 1.0, 1 / 2)
"""Maximum cost of a run, as a multiple of a bin's even share; each is tried."""
MAX_CUT_BACK = 2
"""A run may end early where less is shared, by 1 / MAX_CUT_BACK of its cost at most."""
MAX_GATHERED_TOKENS_RATIO = 8
"""Tokens of all rows of a micro-batch, over its token budget, at most: keys and values are gathered
for each row."""


@dataclass(frozen=True, kw_only=True)
class PackingUnits:
    """The units of a mini-batch, the costliest first."""

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
            rows_I=by_length[:, None].tolist(),
            tokens_I=costs.tokens_R[by_length].tolist(),
            cost_I=costs.cost_R[by_length].tolist(),
        )


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
