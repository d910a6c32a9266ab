"""Fits cuts into cells of a given size: rows move until no rank has too many, and pads find places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.packing.pads import FilledCells, RowsDK, least_rows, pads_in_room

MORE_PAD_LEVELS = 2
"""How often micro-batches may be added to a cut to hold its pads."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Real rows of a mini-batch, by rank and micro-batch; a micro-batch without rows will hold pads."""

    rows_DK: RowsDK
    time: int
    """Cost of the slowest rank, summed over the micro-batches, plus their handling."""


def fit(costs: CallCosts, cut: Cut, size: int) -> FilledCells | None:
    """The cut, changed only as much as cells of ``size`` rows require, with its pads.

    None if rows and pads cannot be made to fit within the token budget.
    """
    fitted = _shrink(costs, cut, size)
    for _ in range(MORE_PAD_LEVELS + 1):
        if fitted is None:
            return None
        pads_DK = pads_in_room(costs, fitted.rows_DK, size)
        if pads_DK is not None:
            return FilledCells(rows_DK=fitted.rows_DK, pads_DK=pads_DK, time=fitted.time)
        fitted = _add_levels(costs, fitted, size)
    return None


def _add_levels(costs: CallCosts, cut: Cut, size: int) -> Cut | None:
    """The cut with room for pads: new micro-batches hold pads, or the shortest row of a rank that has no pad to place.

    A row as long as the token budget leaves no token for the pads that its rank needs.
    """
    rows_DK = [[list(rows) for rows in rows_K] for rows_K in cut.rows_DK]
    height = 0
    for _ in range(costs.call.micro_batch_multiple):
        for rows_K in rows_DK:
            moved = []
            if sum(max(len(rows), 1) for rows in rows_K) == size:
                givers = [rows for rows in rows_K if len(rows) > 1]
                if not givers:
                    return None
                giver = min(givers, key=lambda rows: costs.tokens_R[rows].min())
                row = min(giver, key=lambda row: costs.tokens_R[row])
                giver.remove(row)
                moved.append(row)
                height = max(height, int(costs.cost_R[moved][0]))
            rows_K.append(moved)
    more = costs.call.micro_batch_multiple * (height + costs.level)
    return Cut(rows_DK=rows_DK, time=cut.time + more)


def _shrink(costs: CallCosts, cut: Cut, size: int) -> Cut | None:
    """The cut with at most ``size`` rows on every rank; None if rows cannot be moved within the token budget.

    Ranks with more give away their shortest rows, to the micro-batches farthest below the height of their level. The
    shortest row of a chain is the cheapest to compute apart from it.
    """
    if least_rows(cut.rows_DK) <= size:
        return cut
    budget = costs.call.token_budget
    assert budget is not None
    rows_DK = [[sorted(rows, key=lambda row: -costs.tokens_R[row]) for rows in rows_K] for rows_K in cut.rows_DK]
    used_DK, load_DK = costs.sums(rows_DK)
    height_K = load_DK.max(axis=0)
    places_D = [size - sum(max(len(rows), 1) for rows in rows_K) for rows_K in rows_DK]
    takers = np.array([places > 0 for places in places_D])
    for giver in [rank for rank, places in enumerate(places_D) if places < 0]:
        while places_D[giver] < 0:
            # A micro-batch of one row would need a pad instead: nothing gained.
            level = min(
                (k for k, rows in enumerate(rows_DK[giver]) if len(rows) > 1),
                key=lambda k: costs.tokens_R[rows_DK[giver][k][-1]],
                default=None,
            )
            if level is None:
                return None
            row = rows_DK[giver][level][-1]
            tokens = int(costs.tokens_R[row])
            below_DK = np.where(used_DK + tokens <= budget, height_K - load_DK, np.iinfo(np.int64).min)
            below_DK[~takers] = np.iinfo(np.int64).min
            taker, to_level = divmod(int(below_DK.argmax()), len(height_K))
            if below_DK[taker, to_level] == np.iinfo(np.int64).min:
                return None
            rows_DK[giver][level].pop()
            target = rows_DK[taker][to_level]
            places_D[taker] -= bool(target)  # a row in an empty micro-batch takes the place of a pad
            takers[taker] = places_D[taker] > 0
            target.append(row)
            target.sort(key=lambda row: -costs.tokens_R[row])
            places_D[giver] += 1
            for rank, k in ((giver, level), (taker, to_level)):
                used_DK[rank, k], load_DK[rank, k] = costs.sum(rows_DK[rank][k])
    time = int(load_DK.max(axis=0).sum()) + len(height_K) * costs.level
    return Cut(rows_DK=rows_DK, time=time)
