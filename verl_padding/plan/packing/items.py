"""What is packed as one: a row, a chain, or a run of rows of a tree.

Where rows share their beginnings, a bin should hold rows that share much; but a whole tree may be more than a bin
holds, or more than an even share. So the rows of each tree, in order, are cut into runs, each filled up to a goal and
cut where least is shared. Small runs balance better, large ones share more, and how the two add up is seen when they
are packed: several goals are tried.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.forest import LEAST_SHARED, elsewhere

GOALS = (inf, 1.0, 1 / 2, 1 / 4, 1 / 10)
"""What a run may cost at most, in parts of an even share of a bin."""
GIVEN_UP = 1 / 2
"""Part of a run that may be left to the next one, if less is shared there."""
MOST_GATHERED = 8
"""Tokens of all rows of a micro-batch, over its token budget, at most: keys and values are gathered for each row."""


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a mini-batch, the costliest first."""

    rows_I: list[list[int]]
    tokens_I: list[int]
    """What each takes of a token budget, no less than those behind it: where two are about as costly, a little more."""
    cost_I: list[int]

    @classmethod
    def of_rows(cls, costs: CallCosts, rows: Sequence[int]) -> Items:
        """Each row by itself."""
        by_length = costs.longest_first(rows)
        return cls(
            rows_I=[[row] for row in by_length.tolist()],
            tokens_I=costs.tokens_R[by_length].tolist(),
            cost_I=costs.cost_R[by_length].tolist(),
        )


def ways_to_group(costs: CallCosts, rows: Sequence[int], most_rows: int | None) -> Iterator[Items]:
    """The items of a mini-batch: its rows, its chains, or runs of the rows of its trees, in several sizes.

    Args:
        most_rows: the most rows of an item; None for any number.
    """
    if costs.forest is None:
        yield Items.of_rows(costs, rows)
        return
    numbers, most = np.array(rows, dtype=np.int64), most_rows or len(rows)
    order, shared_I = costs.forest.shared_among(numbers)
    yield _runs(costs, numbers[order], shared_I, most, inf, chains=True)
    tokens_I, cost_I = costs.computed(numbers)
    if len(tokens_I) and (shared_I < costs.tokens_R[numbers[order]])[shared_I >= LEAST_SHARED].any():
        assert costs.call.token_budget is not None
        bins = costs.call.dp_size * -(-int(tokens_I.sum()) // (costs.call.token_budget * costs.call.dp_size))
        yield Items.of_rows(costs, rows)
        for goal in GOALS:
            yield _runs(costs, numbers[order], shared_I, most, goal * int(cost_I.sum()) / bins)


def _runs(
    costs: CallCosts, rows: Int64s, shared_I: Int64s, most: int, most_cost: float, *, chains: bool = False
) -> Items:
    """Runs of rows in the order of their trees, each as long as budget, cost and number of rows allow.

    Args:
        shared_I: tokens that each row shares with the one before it.
        chains: each row of a run but the first is a beginning of the one before.
    """
    budget = costs.call.token_budget
    assert budget is not None
    length_I = costs.tokens_R[rows]
    is_whole_I = shared_I == length_I
    start_I = elsewhere(shared_I, length_I)
    goes_on_I = is_whole_I if chains else start_I > 0
    parts = length_I - start_I, costs.of_rests(rows, start_I), np.where(is_whole_I, 0, length_I)
    # Of the rows before each place, and of the first row of a run: what it shares is computed again.
    tokens_to, cost_to, path_to = (np.append(0, np.cumsum(part)).tolist() for part in parts)
    again_I, own_I = start_I.tolist(), costs.cost_R[rows].tolist()
    starts_path_I = np.where(is_whole_I, length_I, 0).tolist()
    ends = [*(np.flatnonzero(~goes_on_I)[1:]).tolist(), len(rows)]
    numbers, shared = rows.tolist(), shared_I.tolist()
    found: list[tuple[int, int, list[int]]] = []
    first = 0
    for end in ends:
        while first < end:
            again, path = again_I[first], starts_path_I[first]
            cost_before = cost_to[first + 1] - own_I[first]
            last = min(
                bisect_right(tokens_to, tokens_to[first] + budget - again, first, end + 1) - 1,
                bisect_right(path_to, path_to[first] + MOST_GATHERED * budget - path, first, end + 1) - 1,
                bisect_right(cost_to, cost_before + most_cost, first, end + 1) - 1,
                first + most,
            )
            last = max(first + 1, last)
            if last < end and last - first > 1:
                # Where the next row shares least: the last such place among those that leave enough.
                enough = cost_before + (1 - GIVEN_UP) * (cost_to[last] - cost_before)
                least = max(first + 1, bisect_left(cost_to, enough, first, last))
                last = min(range(last, least - 1, -1), key=shared.__getitem__)
            tokens = tokens_to[last] - tokens_to[first] + again
            gathered = -(-(path_to[last] - path_to[first] + path) // MOST_GATHERED)
            found.append((cost_to[last] - cost_before, max(tokens, gathered), numbers[first:last]))
            first = last
    found.sort(key=lambda item: (-item[0], -item[1]))
    taken = np.maximum.accumulate(np.array([tokens for _, tokens, _ in found], dtype=np.int64)[::-1])[::-1]
    return Items(
        rows_I=[run for _, _, run in found],
        tokens_I=np.minimum(taken, budget).tolist(),
        cost_I=[cost for cost, _, _ in found],
    )
