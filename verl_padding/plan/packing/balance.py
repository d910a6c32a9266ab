"""Shares items out over bins so that the costliest bin costs as little as possible."""

from __future__ import annotations

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.lower_bounds import mini_batch_bound
from verl_padding.plan.packing.bins import Bin, spread
from verl_padding.plan.packing.exchanges import exchange

TOLERANCE, FINE_TOLERANCE = 1 / 2048, 1 / 16384
"""The search ends this close above the lower bound: what is left to win is far below the noise of a step."""

FEW = 16
"""Up to this many items per bin, the tolerance is fine: there is more to win, and each exchange is found faster."""

MAX_PAIRS = 1 << 22
"""Pairs of items that are compared in all."""


def balance(cost_I: Int64s, n_bins: int, most: int | None = None) -> list[Bin]:
    """Shares items out over bins; each bin gets at most ``most`` items.

    No bin is empty while there are at least as many items as bins. Longest-processing-time first, then moves and
    swaps that make the costliest bin cheaper. Deterministic: ties go to fewer items, then to the lower number.

    Args:
        cost_I: cost of each item, none below 0.
        most: the most items of a bin, so many that all items fit; None for any number.
    """
    n_items = len(cost_I)
    most = n_items if most is None else most
    assert most * n_bins >= n_items, f"{n_items} items do not fit into {n_bins} bins of {most}"
    ones_I = np.ones(n_items, dtype=np.int64)
    # By cost, then by number of items: no bin stays empty because others hold items that cost nothing.
    with_count_I = [cost * (n_items + 1) + 1 for cost in cost_I.tolist()]
    costliest_first = np.argsort(-cost_I, kind="stable").tolist()
    bins = spread(costliest_first, ones_I.tolist(), with_count_I, [0] * n_bins, most)
    assert bins is not None
    goal = mini_batch_bound(cost_I, n_bins)
    goal += int(goal * (FINE_TOLERANCE if n_items <= FEW * n_bins else TOLERANCE))
    return exchange(bins, ones_I, cost_I, token_budget=most, n_levels=1, goal=goal, max_pairs=MAX_PAIRS)
