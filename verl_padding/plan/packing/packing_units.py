"""What is packed as one: a row, a chain, or a run of rows of a tree.

Where rows share their beginnings, a bin should hold rows that share much; but a whole tree may be
more than a bin holds, or more than an even share. So the rows of each tree, in order, are cut into
runs, each filled up to a goal and cut where least is shared. Small runs balance better, large ones
share more, and how the two add up is seen when they are packed: several goals are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.forest import MIN_SHARED_TOKENS, cached_tokens

GOALS = (inf, 1.0, 1 / 2, 1 / 4, 1 / 10)
"""What a run may cost at most, in parts of an even share of a bin."""
MAX_CUT_BACK = 2
"""One of so many parts of a run may be left to the next one, if less is shared there."""
MAX_GATHERED_TOKENS_RATIO = 8
"""Tokens of all rows of a micro-batch, over its token budget, at most: keys and values are gathered
for each row."""


@dataclass(frozen=True, kw_only=True)
class PackingUnits:
    """The items of a mini-batch, the costliest first."""

    rows: list[int]
    """Rows of all items, those of an item beside each other."""
    first_I: list[int]
    end_I: list[int]
    """Item i has ``rows[first_I[i]:end_I[i]]``."""
    tokens_I: list[int]
    """What each takes of a token budget, no less than those behind it: where two are about as
    costly, a little more."""
    cost_I: list[int]

    @classmethod
    def of_rows(cls, costs: CallCosts, rows: Sequence[int]) -> PackingUnits:
        """Each row by itself."""
        by_length = costs.longest_first(rows)
        return cls(
            rows=by_length.tolist(),
            first_I=[*range(len(by_length))],
            end_I=[*range(1, len(by_length) + 1)],
            tokens_I=costs.tokens_R[by_length].tolist(),
            cost_I=costs.cost_R[by_length].tolist(),
        )

    def __len__(self) -> int:
        return len(self.first_I)

    def n_rows(self, items: Sequence[int]) -> int:
        """How many rows some items have."""
        return sum(self.end_I[item] - self.first_I[item] for item in items)

    def rows_of(self, items: Sequence[int]) -> list[int]:
        """The rows of some items, one item after the other."""
        return [row for item in items for row in self.rows[self.first_I[item] : self.end_I[item]]]


def candidate_groupings(
    costs: CallCosts, rows: Sequence[int], most_rows: int | None
) -> Iterator[PackingUnits]:
    """The items of a mini-batch: its rows, its chains, or runs of the rows of its trees, in several
    sizes.

    Args:
        most_rows: the most rows of an item; None for any number.
    """
    if costs.forest is None:
        yield PackingUnits.of_rows(costs, rows)
        return
    numbers, most = np.array(rows, dtype=np.int64), most_rows or len(rows)
    order, shared_I = costs.forest.shared_among(numbers)
    in_order, all_of_it = numbers[order], int(costs.cost_R[numbers].sum())
    yield _runs(costs, in_order, shared_I, most, all_of_it, chains=True)
    tokens_I, cost_I = costs.computed(numbers)
    if len(tokens_I) and (shared_I < costs.tokens_R[in_order])[shared_I >= MIN_SHARED_TOKENS].any():
        assert costs.call.token_budget is not None
        bins = costs.call.dp_size * -(
            -int(tokens_I.sum()) // (costs.call.token_budget * costs.call.dp_size)
        )
        yield PackingUnits.of_rows(costs, rows)
        for goal in GOALS:
            yield _runs(
                costs,
                in_order,
                shared_I,
                most,
                int(min(goal * int(cost_I.sum()) / bins, all_of_it)),
            )


def _runs(
    costs: CallCosts,
    rows: Int64s,
    shared_I: Int64s,
    most: int,
    most_cost: int,
    *,
    chains: bool = False,
) -> PackingUnits:
    """Runs of rows in the order of their trees, each as long as budget, cost and number of rows
    allow.

    Args:
        shared_I: tokens that each row shares with the one before it.
        chains: each row of a run but the first is a beginning of the one before.
    """
    budget, places = costs.call.token_budget, np.arange(len(rows))
    assert budget is not None
    length_I = costs.tokens_R[rows]
    is_whole_I = shared_I == length_I
    start_I = cached_tokens(shared_I, length_I)
    begins_tree_I = ~is_whole_I if chains else start_I == 0
    parts = (
        length_I - start_I,
        costs.suffix_cost(rows, start_I),
        np.where(is_whole_I, 0, length_I),
        np.where(is_whole_I, 0, costs.call.min_branch_tokens),
    )
    # Of the rows before each place. What the first row of a run shares is computed again.
    tokens_to, cost_to, path_to, branches_to = (np.append(0, np.cumsum(part)) for part in parts)
    cost_before_I = cost_to[1:] - costs.cost_R[rows]
    path_before_I = path_to[:-1] - np.where(is_whole_I, length_I, 0)
    # Of a run that begins at each place: its end, and the places where it may end earlier, if less
    # is shared there.
    trees = np.append(np.flatnonzero(begins_tree_I), len(rows))
    tree_end_I = trees[np.searchsorted(trees, places, side="right")]
    ends = (
        np.searchsorted(tokens_to, tokens_to[:-1] - start_I + budget, side="right") - 1,
        np.searchsorted(path_to, path_before_I + MAX_GATHERED_TOKENS_RATIO * budget, side="right")
        - 1,
        np.searchsorted(branches_to, branches_to[:-1] + budget, side="right") - 1,
        np.searchsorted(cost_to, cost_before_I + most_cost, side="right") - 1,
        places + most,
        tree_end_I,
    )
    end_I = np.maximum(np.minimum.reduce(ends), places + 1)
    enough_I = cost_to[end_I] - (cost_to[end_I] - cost_before_I) // MAX_CUT_BACK
    least_I = np.maximum(np.searchsorted(cost_to, enough_I), places + 1)
    is_cut_I = (end_I < tree_end_I) & (end_I > least_I)
    ends_at, least, is_cut, shared = (
        end_I.tolist(),
        least_I.tolist(),
        is_cut_I.tolist(),
        shared_I.tolist(),
    )
    firsts = []
    place = 0
    while place < len(rows):
        firsts.append(place)
        end = ends_at[place]
        # The last of the places where least is shared.
        place = (
            min(range(end, least[place] - 1, -1), key=shared.__getitem__) if is_cut[place] else end
        )
    first_J, end_J = (
        np.array(firsts, dtype=np.int64),
        np.array([*firsts[1:], len(rows)], dtype=np.int64),
    )
    cost_J = cost_to[end_J] - cost_before_I[first_J]
    gathered_J = -(-(path_to[end_J] - path_before_I[first_J]) // MAX_GATHERED_TOKENS_RATIO)
    tokens_J = np.maximum(tokens_to[end_J] - tokens_to[first_J] + start_I[first_J], gathered_J)
    # A row by itself keeps no state.
    branches_J = np.where(end_J - first_J > 1, branches_to[end_J] - branches_to[first_J], 0)
    tokens_J = np.maximum(tokens_J, branches_J)
    order = np.lexsort((-tokens_J, -cost_J))
    taken = np.maximum.accumulate(tokens_J[order][::-1])[::-1]
    return PackingUnits(
        rows=rows.tolist(),
        first_I=first_J[order].tolist(),
        end_I=end_J[order].tolist(),
        tokens_I=np.minimum(taken, budget).tolist(),
        cost_I=cost_J[order].tolist(),
    )
