"""What is packed as one: a row, a chain, or a run of rows of a tree.

Where rows share their beginnings, a bin should hold rows that share much; but a whole tree may be more than a bin
holds, or more than an even share. So the rows of each tree, in order, are cut into runs, each filled up to a goal and
cut where least is shared. Small runs balance better, large ones share more, and how the two add up is seen when they
are packed: several goals are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.forest import LEAST_SHARED

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
    most = most_rows or len(rows)
    yield _runs(costs, rows, most, inf, chains=True)
    _, start_I = costs.forest.segments(rows)
    if start_I.any():
        assert costs.call.token_budget is not None
        tokens, cost = (int(part.sum()) for part in costs.computed(rows))
        bins = costs.call.dp_size * -(-tokens // (costs.call.token_budget * costs.call.dp_size))
        for goal in GOALS:
            yield _runs(costs, rows, most, goal * cost / bins)


def _runs(costs: CallCosts, rows: Sequence[int], most: int, most_cost: float, *, chains: bool = False) -> Items:
    """Runs of the rows in the order of their trees, each as long as budget, cost and number of rows allow.

    Args:
        chains: each row of a run but the first is a beginning of the one before.
    """
    assert costs.forest is not None
    budget = costs.call.token_budget
    assert budget is not None
    numbers, shared_I = costs.forest.shared_among(rows)
    length_I = costs.tokens_R[numbers]
    is_whole_I = shared_I == length_I
    start_I = np.where(is_whole_I, shared_I, np.where(shared_I >= LEAST_SHARED, shared_I - 1, 0))
    tokens_I, cost_I = length_I - start_I, costs.of_rests(numbers, start_I)
    path_I = np.where(is_whole_I, 0, length_I)
    goes_on_I = is_whole_I if chains else start_I > 0
    tokens_to, cost_to, path_to = (np.append(0, np.cumsum(part)) for part in (tokens_I, cost_I, path_I))
    ends = np.append(np.flatnonzero(~goes_on_I)[1:], len(numbers))
    found: list[tuple[int, int, list[int]]] = []
    first = 0
    for end in ends.tolist():
        while first < end:
            # What the first row of a run shares with the row before it is computed again.
            again, own = int(start_I[first]), int(costs.cost_R[numbers[first]])
            path = 0 if path_I[first] else int(length_I[first])
            limits = (
                np.searchsorted(tokens_to, tokens_to[first] + budget - again, side="right") - 1,
                np.searchsorted(path_to, path_to[first] + MOST_GATHERED * budget - path, side="right") - 1,
                end
                if most_cost == inf
                else np.searchsorted(cost_to[: end + 1], cost_to[first + 1] + most_cost - own, "right") - 1,
                first + most,
            )
            last = max(first + 1, min(end, *map(int, limits)))
            if last < end and last - first > 1:
                last = _where_least_is_shared(shared_I, cost_to, own, first, last)
            tokens = int(tokens_to[last] - tokens_to[first]) + again
            gathered = -(-(int(path_to[last] - path_to[first]) + path) // MOST_GATHERED)
            cost = int(cost_to[last] - cost_to[first + 1]) + own
            found.append((cost, max(tokens, gathered), numbers[first:last].tolist()))
            first = last
    found.sort(key=lambda item: (-item[0], -item[1]))
    taken = np.maximum.accumulate(np.array([tokens for _, tokens, _ in found], dtype=np.int64)[::-1])[::-1]
    return Items(
        rows_I=[rows for _, _, rows in found],
        tokens_I=np.minimum(taken, budget).tolist(),
        cost_I=[cost for cost, _, _ in found],
    )


def _where_least_is_shared(shared_I: Int64s, cost_to: Int64s, own: int, first: int, last: int) -> int:
    """Where a run that might end before ``last`` ends: where the next row shares least, the last such place."""
    enough = (1 - GIVEN_UP) * (cost_to[last] - cost_to[first + 1] + own)
    least = max(first + 1, int(np.searchsorted(cost_to, cost_to[first + 1] + enough - own, side="left")))
    places = np.arange(least, last + 1)
    return int(places[len(places) - 1 - int(shared_I[places][::-1].argmin())])
