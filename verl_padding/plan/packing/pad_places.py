"""Where pads go: local mini-batches are filled up with them, micro-batch by micro-batch.

Where every micro-batch has a fixed number of places, pads take those that are left. Where
micro-batches are cut by tokens, those where a rank waits for others come first. If they have no
room, rows move and micro-batches are added.

A micro-batch without rows will hold pads. Each pad is there as the number ``n_rows``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import RowsDK


def fill_places(costs: CallCosts, rows_DK: RowsDK, places_K: Sequence[int]) -> RowsDK:
    """Micro-batches of fixed numbers of places: pads take all that the rows of each leave.

    Args:
        places_K: places of micro-batch k, the same on all ranks.
    """
    return [
        [
            [*rows, *[costs.n_rows] * (n - len(rows))]
            for n, rows in zip(places_K, rows_K, strict=True)
        ]
        for rows_K in rows_DK
    ]


def rows_needed(rows_K: Sequence[Sequence[int]]) -> int:
    """Rows of a rank's local mini-batch, with a pad in each micro-batch without rows."""
    return sum(len(rows) or 1 for rows in rows_K)


def fit(costs: CallCosts, rows_DK: RowsDK, size: int) -> RowsDK:
    """Micro-batches with pads, in local mini-batches of ``size`` rows: rows move only as much as
    that requires, and micro-steps are added until all have room."""
    # A row as long as the token budget leaves no token for the pads that its rank needs. With a
    # micro-batch for each place of a local mini-batch, all have room.
    while True:
        moved_DK = _shrink(costs, rows_DK, size)
        filled_DK = None if moved_DK is None else _with_pads(costs, moved_DK, size)
        if filled_DK is not None:
            return filled_DK
        assert len(rows_DK[0]) < size, f"{len(rows_DK[0])} micro-batches for {size} rows"
        more = range(costs.call.micro_batch_multiple)
        rows_DK = [[*rows_K, *([] for _ in more)] for rows_K in rows_DK]


def _with_pads(costs: CallCosts, rows_DK: RowsDK, size: int) -> RowsDK | None:
    """The micro-batches with pads, in local mini-batches of ``size`` rows; None if pads have no
    room, or rows that have moved branch off others there and take more than the token budget."""
    # Micro-batches that cost 9 | 7 and 4 | 4 on two ranks: the second rank waits in the first one,
    # so its pads go there, as many as cost 2 and as fit into the budget, and then to either.
    _, used_DK, load_DK = costs.micro_batch_loads(rows_DK)
    room_DK = costs.token_budget - used_DK
    if (room_DK < 0).any():
        return None
    room_DK //= costs.pad_tokens
    below_DK = (load_DK.max(axis=0) - load_DK) // max(costs.pad, 1)
    filled_DK = []
    for rows_K, room_K, below_K in zip(rows_DK, room_DK, below_DK, strict=True):
        pads_K = [0 if rows else 1 for rows in rows_K]
        left = size - rows_needed(rows_K)
        # Where the rank waits for others first, then wherever tokens are left.
        for max_pads_K in (np.minimum(room_K, below_K), room_K) if left > 0 else ():
            for k in np.argsort(-max_pads_K, kind="stable").tolist():
                added = max(min(left, int(max_pads_K[k]) - pads_K[k]), 0)
                pads_K[k] += added
                left -= added
        if left:
            return None
        filled_DK.append(
            [[*rows, *[costs.n_rows] * pads] for rows, pads in zip(rows_K, pads_K, strict=True)]
        )
    return filled_DK


def _shrink(costs: CallCosts, rows_DK: RowsDK, size: int) -> RowsDK | None:
    """The micro-batches with at most ``size`` rows on every rank; None if rows cannot be moved
    within the token budget.

    Ranks with more give away their shortest rows, to the micro-batches farthest below the makespan
    of their micro-step. With places for 3 rows, 9 1 | 5 2 and 7 | 4 become 9 | 5 2 and 7 1 | 4: the
    second rank waits for the first one's 9.
    """
    needed_D = np.array(list(map(rows_needed, rows_DK)))
    if needed_D.max() <= size:
        return rows_DK
    budget, never = costs.token_budget, np.iinfo(np.int64).min
    tokens_R, cost_R = costs.tokens_R, costs.cost_R
    moved_DK = [[list(rows) for rows in rows_K] for rows_K in rows_DK]
    # A row that moves counts as if it shared nothing where it comes to, and nothing is counted less
    # where it was: what a micro-batch computes in the end is no more than that.
    tokens_DK, _, load_DK = costs.micro_batch_loads(rows_DK)
    makespan_K = load_DK.max(axis=0)
    places_D = size - needed_D
    # In a micro-batch without rows, also of the same rank, a row takes the place of a pad.
    is_empty_DK = np.array([[not rows for rows in rows_K] for rows_K in rows_DK])
    for giver in np.flatnonzero(places_D < 0).tolist():
        shortest_first = sorted(
            (int(tokens_R[row]), row, rows) for rows in moved_DK[giver] for row in rows
        )
        for tokens, row, rows in shortest_first:
            if places_D[giver] >= 0:
                break
            if len(rows) == 1:
                continue  # a micro-batch of one row would need a pad instead: nothing gained
            has_room_DK = (tokens_DK + tokens <= budget) & (is_empty_DK | (places_D > 0)[:, None])
            below_DK = np.where(has_room_DK, makespan_K - load_DK, never)
            taker, k = divmod(int(below_DK.argmax()), len(makespan_K))
            if below_DK[taker, k] == never:
                return None
            places_D[taker] -= not is_empty_DK[taker, k]
            places_D[giver] += 1
            is_empty_DK[taker, k] = False
            rows.remove(row)
            moved_DK[taker][k].append(row)
            tokens_DK[taker, k] += tokens
            load_DK[taker, k] += cost_R[row]
        if places_D[giver] < 0:
            return None
    return moved_DK
