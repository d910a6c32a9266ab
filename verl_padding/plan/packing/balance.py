"""Shares items out over bins so that the costliest bin costs as little as possible."""

from __future__ import annotations

import heapq

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.lower_bounds import mini_batch_bound

Bins = list[list[int]]

TOLERANCE, FINE_TOLERANCE = 1 / 2048, 1 / 16384
"""The search ends this close above the lower bound: what is left to win is far below the noise of a step."""

FEW = 16
"""Up to this many items per bin, the tolerance is fine: there is more to win, and each exchange is found faster."""

MAX_PAIRS = 1 << 16
"""Pairs of items looked at in one improvement: the lightest bins come first, so the best pair is among them."""


def balance(cost_I: Int64s, n_bins: int, most: int | None = None) -> Bins:
    """Shares items out over bins; each bin gets at most ``most`` items.

    No bin is empty while there are at least as many items as bins. Longest-processing-time first, then moves and
    swaps that make the costliest bin cheaper. Deterministic: ties go to fewer items, then to the lower number.

    Args:
        cost_I: cost of each item, none below 0.
        most: the most items of a bin, so many that all items fit; None for any number.
    """
    most = len(cost_I) if most is None else most
    assert most * n_bins >= len(cost_I), f"{len(cost_I)} items do not fit into {n_bins} bins of {most}"
    bins = _longest_first(cost_I, n_bins, most)
    return _improve(bins, cost_I, most)


def _longest_first(cost_I: Int64s, n_bins: int, most: int) -> Bins:
    costs: list[int] = cost_I.tolist()
    bins: Bins = [[] for _ in range(n_bins)]
    # (load, items, bin): empty bins come before bins that hold free items only, so that none stays empty.
    heap = [(0, 0, number) for number in range(n_bins)]
    for item in np.argsort(-cost_I, kind="stable").tolist():
        load, count, number = heap[0]
        bins[number].append(item)
        if count + 1 < most:
            heapq.heapreplace(heap, (load + costs[item], count + 1, number))
        else:
            heapq.heappop(heap)
    return bins


def _improve(bins: Bins, cost_I: Int64s, most: int) -> Bins:
    """Moves one item out of the costliest bin, or swaps it for a cheaper one, while that helps."""
    n_bins = len(bins)
    load_B = np.array([int(cost_I[items].sum()) if items else 0 for items in bins], dtype=np.int64)
    goal = mini_batch_bound(cost_I, n_bins)
    goal += int(goal * (FINE_TOLERANCE if len(cost_I) <= FEW * n_bins else TOLERANCE))
    # Each round makes the costliest bin cheaper, so that this ends by itself; the bound keeps it short.
    for _ in range(4 * n_bins + 64):
        costliest = int(load_B.argmax())
        if load_B[costliest] <= goal:
            break
        exchange = _best_exchange(bins, load_B, cost_I, costliest, most)
        if exchange is None:
            break
        place, other, other_place = exchange
        item = bins[costliest].pop(place)
        returned = bins[other].pop(other_place) if other_place < len(bins[other]) else None
        bins[other].append(item)
        if returned is not None:
            bins[costliest].append(returned)
        change = int(cost_I[item]) - (0 if returned is None else int(cost_I[returned]))
        load_B[costliest] -= change
        load_B[other] += change
    return bins


def _best_exchange(
    bins: Bins, load_B: Int64s, cost_I: Int64s, costliest: int, most: int
) -> tuple[int, int, int] | None:
    """The exchange after which the costlier of its two bins is cheapest, if that is cheaper than now.

    Returns:
        Place in the costliest bin, the other bin, and the place there; a place behind its last item is a plain move.
    """
    load = int(load_B[costliest])
    out_J = cost_I[bins[costliest]]
    may_move = len(out_J) > 1  # a bin must not become empty
    best, found = load, None
    pairs = 0
    for other in np.argsort(load_B, kind="stable").tolist():
        other_load = int(load_B[other])
        # Half way between two loads is the best that an exchange reaches: no later bin can do better.
        if other == costliest or (load + other_load) // 2 >= best or pairs > MAX_PAIRS:
            break
        in_I = cost_I[bins[other]]
        if may_move and len(in_I) < most:
            in_I = np.append(in_I, 0)
        if not len(in_I):
            continue
        pairs += len(out_J) * len(in_I)
        change_JI = out_J[:, None] - in_I[None, :]
        costlier_JI = np.maximum(load - change_JI, other_load + change_JI)
        at = int(costlier_JI.argmin())
        if int(costlier_JI.flat[at]) < best:
            best = int(costlier_JI.flat[at])
            found = (at // len(in_I), other, at % len(in_I))
    return found
