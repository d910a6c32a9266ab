"""Deals the rows of a mini-batch out to ranks, so that the slowest rank is as fast as can be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

CLOSE_ENOUGH = 1.001
"""Over the lower bound: closer than this, a search for a better deal is not worth its time."""

MOST_EXCHANGES = 64
"""Exchanges tried after the greedy deal; nearly all that they gain comes with the first few."""

Ranks = list[list[int]]
"""Row numbers of each rank."""


def lower_bound(costs: np.ndarray, n_ranks: int) -> float:
    """What no deal can beat: the dearest row, and the mean of the ranks.

    Args:
        costs: (R,) cost of each row of the mini-batch.
    """
    return float(max(costs.max(), costs.sum() / n_ranks))


def deal_rows(rows: Sequence[int], costs: np.ndarray, n_ranks: int, most_rows: int) -> Ranks:
    """Deals ``rows`` to ranks: greedy, dearest first, then exchanges between the slowest rank and another.

    Each rank gets a row while there are at least as many rows as ranks, and none gets more than ``most_rows``.

    Args:
        rows: row numbers of the mini-batch, at most ``n_ranks * most_rows``.
        costs: (R,) positive cost of each row of the batch, by row number.
    """
    assert len(rows) <= n_ranks * most_rows, (len(rows), n_ranks, most_rows)
    ranks: Ranks = [[] for _ in range(n_ranks)]
    # Among equal loads the rank with fewer rows: it will need the more pads.
    heap = [(0.0, 0, rank) for rank in range(n_ranks)]
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        load, count, rank = heapq.heappop(heap)
        ranks[rank].append(row)
        if count + 1 < most_rows:
            heapq.heappush(heap, (load + float(costs[row]), count + 1, rank))
    _exchange(ranks, costs, lower_bound(costs[list(rows)], n_ranks), most_rows)
    return [sorted(rank) for rank in ranks]


def _exchange(ranks: Ranks, costs: np.ndarray, bound: float, most_rows: int) -> None:
    """Moves and swaps of one row between the slowest rank and another, the best first, while the slowest gains."""
    loads = np.array([costs[rank].sum() for rank in ranks], dtype=np.float64)
    for _ in range(MOST_EXCHANGES):
        slow = int(loads.argmax())
        if loads[slow] <= bound * CLOSE_ENOUGH:
            return
        best: tuple[float, int, int, int | None] | None = None
        for fast in np.argsort(loads, kind="stable")[: len(ranks) - 1].tolist():
            gap = loads[slow] - loads[fast]
            found = _best_exchange(ranks[slow], ranks[fast], costs, gap, most_rows)
            # The slower of the two after an exchange that shifts `gain` from one to the other.
            if found is not None:
                gain, a, b = found
                slower = max(loads[slow] - gain, loads[fast] + gain)
                if best is None or slower < best[0]:
                    best = (slower, fast, a, b)
        if best is None or best[0] >= loads[slow] * (1 - 1e-9):
            return
        _, fast, a, b = best
        ranks[slow].remove(a)
        ranks[fast].append(a)
        if b is not None:
            ranks[fast].remove(b)
            ranks[slow].append(b)
        for rank in (slow, fast):
            loads[rank] = costs[ranks[rank]].sum()


def _best_exchange(
    slow: list[int], fast: list[int], costs: np.ndarray, gap: float, most_rows: int
) -> tuple[float, int, int | None] | None:
    """(cost shifted, row that leaves the slow rank, row that comes back or None), nearest to half of the gap."""
    options: list[tuple[float, int, int | None]] = []
    if len(fast) < most_rows and len(slow) > 1:
        gains = costs[slow]
        a = int(np.abs(2 * gains - gap).argmin())
        options.append((float(gains[a]), slow[a], None))
    if fast:
        gains = costs[slow][:, None] - costs[fast][None, :]
        a, b = divmod(int(np.abs(2 * gains - gap).argmin()), len(fast))
        options.append((float(gains[a, b]), slow[a], fast[b]))
    options = [option for option in options if 0 < option[0] < gap]
    return min(options, key=lambda option: abs(2 * option[0] - gap), default=None)
