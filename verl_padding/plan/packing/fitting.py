"""Fits cuts into cells of a given size: rows move until no rank has too many, and pads find places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.packing.pads import FilledCells

MORE_PAD_LEVELS = 2
"""How often micro-batches may be added to a cut to hold its pads."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Real rows of a mini-batch, by rank and micro-batch, without pads; all ranks have equally many micro-batches."""

    rows_DK: list[list[list[int]]]
    """Row numbers of each rank's micro-batches; a micro-batch without rows will hold pads."""

    time: int
    """Cost of the slowest rank, summed over the micro-batches, plus their handling."""

    @property
    def least_rows(self) -> int:
        """Rows that a cell needs: the fullest rank's, with a pad in each micro-batch without rows."""
        return max(sum(max(len(rows), 1) for rows in rows_K) for rows_K in self.rows_DK)


def fit(costs: CallCosts, cut: MicroBatches, size: int) -> FilledCells | None:
    """The cut, changed only as much as cells of ``size`` rows require, and the pads of each rank's micro-batches.

    None if rows and pads cannot be made to fit within the token budget.
    """
    fitted = _shrink(costs, cut, size)
    for _ in range(MORE_PAD_LEVELS + 1):
        if fitted is None:
            return None
        pads_DK = _place_pads(costs, fitted, size)
        if pads_DK is not None:
            return FilledCells(rows_DK=fitted.rows_DK, pads_DK=pads_DK, time=fitted.time)
        fitted = _add_levels(costs, fitted, size)
    return None


def _add_levels(costs: CallCosts, cut: MicroBatches, size: int) -> MicroBatches | None:
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
    return MicroBatches(rows_DK=rows_DK, time=cut.time + more)


def _shrink(costs: CallCosts, cut: MicroBatches, size: int) -> MicroBatches | None:
    """The cut with at most ``size`` rows on every rank; None if rows cannot be moved within the token budget.

    Ranks with more give away their shortest rows, to the micro-batches farthest below the height of their level. The
    shortest row of a chain is the cheapest to compute apart from it.
    """
    if cut.least_rows <= size:
        return cut
    budget = costs.call.token_budget
    assert budget is not None
    rows_DK = [[sorted(rows, key=lambda row: -costs.tokens_R[row]) for rows in rows_K] for rows_K in cut.rows_DK]
    used_DK, load_DK = _sums(costs, rows_DK)
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
                used_DK[rank, k], load_DK[rank, k] = _sums_of(costs, rows_DK[rank][k])
    time = int(load_DK.max(axis=0).sum()) + len(height_K) * costs.level
    return MicroBatches(rows_DK=rows_DK, time=time)


def _sums(costs: CallCosts, rows_DK: list[list[list[int]]]) -> tuple[Int64s, Int64s]:
    """Tokens and cost (D, K) of each rank's micro-batches, as they are computed."""
    sums_DK = [[_sums_of(costs, rows) for rows in rows_K] for rows_K in rows_DK]
    tokens_DK = [[tokens for tokens, _ in sums_K] for sums_K in sums_DK]
    cost_DK = [[cost for _, cost in sums_K] for sums_K in sums_DK]
    return np.array(tokens_DK), np.array(cost_DK)


def _sums_of(costs: CallCosts, rows: list[int]) -> tuple[int, int]:
    computed = costs.computed(rows)
    return int(costs.tokens_R[computed].sum()), int(costs.cost_R[computed].sum())


def _place_pads(costs: CallCosts, cut: MicroBatches, size: int) -> list[list[int]] | None:
    """How many pads go into each rank's micro-batches, for cells of ``size`` rows; None if they do not fit."""
    assert costs.call.token_budget is not None
    pad_cost = max(costs.pad, 1)
    tokens_DK, load_DK = _sums(costs, cut.rows_DK)
    room_DK = (costs.call.token_budget - tokens_DK) // costs.pad_tokens
    below_DK = (load_DK.max(axis=0) - load_DK) // pad_cost
    pads_DK = []
    for rows_K, room_K, below_K in zip(cut.rows_DK, room_DK.tolist(), below_DK.tolist(), strict=True):
        pads_K = [0 if rows else 1 for rows in rows_K]
        left = size - sum(map(len, rows_K)) - sum(pads_K)
        if left < 0:
            return None
        # Where the rank waits for others first, then wherever tokens are left.
        for most_K in (np.minimum(room_K, below_K).tolist(), room_K):
            for k in sorted(range(len(pads_K)), key=lambda k: -most_K[k]):
                added = max(min(left, most_K[k] - pads_K[k]), 0)
                pads_K[k] += added
                left -= added
        if left:
            return None
        pads_DK.append(pads_K)
    return pads_DK
