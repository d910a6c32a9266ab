"""Where pads go: cells are filled up with them, micro-batch by micro-batch.

Where every micro-batch has a fixed number of places, pads take those that are left. Where
micro-batches are cut by tokens, those where a rank waits for others come first. If they have no
room, rows move and micro-batches are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout

MAX_ADDED_STEPS = 2
"""How often micro-batches may be added to a cut to hold its pads."""

RowsDK = list[list[list[int]]]
"""Row numbers of each rank's micro-batches; all ranks have equally many."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Real rows of a mini-batch, by rank and micro-batch; a micro-batch without rows will hold
    pads."""

    rows_DK: RowsDK
    time: int = 0
    """Cost of the slowest rank, summed over the micro-batches, plus their handling; 0 where it is
    not compared."""


@dataclass(frozen=True, kw_only=True)
class FilledCells(Cut):
    """The cells of a mini-batch, all of one size."""

    pads_DK: list[list[int]]
    """Pads of each rank's micro-batches."""

    @classmethod
    def filled_up(cls, rows_DK: RowsDK, places_K: Sequence[int]) -> FilledCells:
        """Fills micro-batch k of each rank up to its number of places."""
        pads_DK = [
            [n - len(rows) for n, rows in zip(places_K, rows_K, strict=True)] for rows_K in rows_DK
        ]
        return cls(rows_DK=rows_DK, pads_DK=pads_DK)


def numbered(
    cells_M: Sequence[FilledCells], costs: CallCosts, *, with_micro_batches: bool
) -> Layout:
    """The layout of cells that are filled: pads are numbered from ``n_rows`` on, by mini-batch,
    rank and micro-batch.

    Args:
        with_micro_batches: False where the workers cut them.
    """
    n_rows = costs.n_rows
    next_pad = count(n_rows)
    if with_micro_batches and not costs.call.has_pipeline:
        cells_M = [_largest_first(costs, filled) for filled in cells_M]
    held_MDK = [
        [
            [
                sorted(rows) + list(islice(next_pad, pads))
                for rows, pads in zip(rows_K, pads_K, strict=True)
            ]
            for rows_K, pads_K in zip(filled.rows_DK, filled.pads_DK, strict=True)
        ]
        for filled in cells_M
    ]
    cells = tuple(
        tuple(tuple(chain.from_iterable(held_K)) for held_K in held_DK) for held_DK in held_MDK
    )
    n_rows_MDK = tuple(tuple(tuple(map(len, held_K)) for held_K in held_DK) for held_DK in held_MDK)
    return Layout(
        n_rows=n_rows,
        cells=cells,
        micro_batch_rows=n_rows_MDK if with_micro_batches else None,
        by_tokens=with_micro_batches and costs.call.token_budget is not None,
    )


def _largest_first(costs: CallCosts, filled: FilledCells) -> FilledCells:
    """The micro-batches in the order of the most tokens that a rank computes in them, on all ranks
    alike.

    Memory then runs out early, if it does: by the second one, beside the first gradients.
    """
    pads_DK = np.array(filled.pads_DK)
    if costs.call.padded_to == "row":
        tokens_DK = costs.micro_batch_loads(filled.rows_DK)[0] + pads_DK * costs.pad_tokens
    else:
        longest_DK = [
            [
                max((int(costs.tokens_R[row]) for row in rows), default=costs.pad_tokens)
                for rows in rows_K
            ]
            for rows_K in filled.rows_DK
        ]
        tokens_DK = (
            np.array([[*map(len, rows_K)] for rows_K in filled.rows_DK]) + pads_DK
        ) * longest_DK
    order_K = np.argsort(-tokens_DK.max(axis=0), kind="stable").tolist()
    rows_DK = [[rows_K[k] for k in order_K] for rows_K in filled.rows_DK]
    return replace(
        filled, rows_DK=rows_DK, pads_DK=[[pads_K[k] for k in order_K] for pads_K in filled.pads_DK]
    )


def blocks(rows: Sequence[int], n_blocks: int, size: int, *, spread_pads: bool) -> list[list[int]]:
    """Cuts rows, longest first, into blocks of ``size`` places; the last places of the last blocks
    are for pads.

    With ``spread_pads``, no block holds only pads while there are rows for all.
    """
    found, begin = [], 0
    for later_blocks in reversed(range(n_blocks)):
        left = len(rows) - begin
        end = begin + min(size, max(left - later_blocks, min(left, 1)) if spread_pads else left)
        found.append(list(rows[begin:end]))
        begin = end
    return found


def min_rows_of(rows_DK: RowsDK) -> int:
    """Rows that a cell needs: the fullest rank's, with a pad in each micro-batch without rows."""
    return max(map(_rows_needed, rows_DK))


def _rows_needed(rows_K: list[list[int]]) -> int:
    return sum(max(len(rows), 1) for rows in rows_K)


def with_pads(costs: CallCosts, cut: Cut, size: int) -> FilledCells | None:
    """The cut with pads, in cells of ``size`` rows; None if rows or pads have no room in them."""
    rows_DK = cut.rows_DK
    if min_rows_of(rows_DK) > size:
        return None
    assert costs.call.token_budget is not None
    tokens_DK, load_DK = costs.micro_batch_loads(rows_DK)
    room_DK = (costs.call.token_budget - tokens_DK) // costs.pad_tokens
    below_DK = (load_DK.max(axis=0) - load_DK) // max(costs.pad, 1)
    pads_DK = []
    for rows_K, room_K, below_K in zip(rows_DK, room_DK.tolist(), below_DK.tolist(), strict=True):
        pads_K = [0 if rows else 1 for rows in rows_K]
        left = size - _rows_needed(rows_K)
        # Where the rank waits for others first, then wherever tokens are left.
        for most_K in (np.minimum(room_K, below_K).tolist(), room_K):
            for k in sorted(range(len(pads_K)), key=lambda k: -most_K[k]):
                added = max(min(left, most_K[k] - pads_K[k]), 0)
                pads_K[k] += added
                left -= added
        if left:
            return None
        pads_DK.append(pads_K)
    return FilledCells(rows_DK=rows_DK, time=cut.time, pads_DK=pads_DK)


def fit(costs: CallCosts, cut: Cut, size: int) -> FilledCells | None:
    """The cut, changed only as much as cells of ``size`` rows require, with its pads; None if there
    is no room."""
    fitted = _shrink(costs, cut, size)
    for _ in range(MAX_ADDED_STEPS + 1):
        if fitted is None:
            return None
        filled = with_pads(costs, fitted, size)
        if filled is not None:
            return filled
        fitted = _add_micro_steps(costs, fitted, size)
    return None


def _add_micro_steps(costs: CallCosts, cut: Cut, size: int) -> Cut | None:
    """The cut with room for pads: new micro-batches hold pads, or the shortest row of a rank that
    has no pad to place.

    A row as long as the token budget leaves no token for the pads that its rank needs.
    """
    rows_DK = [[list(rows) for rows in rows_K] for rows_K in cut.rows_DK]
    height = 0
    for _ in range(costs.call.micro_batch_multiple):
        for rows_K in rows_DK:
            moved = []
            if _rows_needed(rows_K) == size:
                movable = [(row, rows) for rows in rows_K if len(rows) > 1 for row in rows]
                if not movable:
                    return None
                row, giver = min(movable, key=lambda each: costs.tokens_R[each[0]])
                giver.remove(row)
                moved.append(row)
                height = max(height, int(costs.cost_R[row]))
            rows_K.append(moved)
    return Cut(
        rows_DK=rows_DK,
        time=cut.time + costs.call.micro_batch_multiple * (height + costs.micro_batch_overhead),
    )


def _shrink(costs: CallCosts, cut: Cut, size: int) -> Cut | None:
    """The cut with at most ``size`` rows on every rank; None if rows cannot be moved within the
    token budget.

    Ranks with more give away their shortest rows, to the micro-batches farthest below the height of
    their micro-step. The shortest of rows that begin alike is the cheapest to compute apart from
    them.
    """
    if min_rows_of(cut.rows_DK) <= size:
        return cut
    budget, never = costs.call.token_budget, np.iinfo(np.int64).min
    assert budget is not None
    rows_DK = [
        [sorted(rows, key=lambda row: -costs.tokens_R[row]) for rows in rows_K]
        for rows_K in cut.rows_DK
    ]
    used_DK, load_DK = costs.micro_batch_loads(rows_DK)
    height_K = load_DK.max(axis=0)
    places_D = np.array([size - _rows_needed(rows_K) for rows_K in rows_DK])
    for giver in np.flatnonzero(places_D < 0).tolist():
        while places_D[giver] < 0:
            # A micro-batch of one row would need a pad instead: nothing gained.
            step = min(
                (k for k, rows in enumerate(rows_DK[giver]) if len(rows) > 1),
                key=lambda k: costs.tokens_R[rows_DK[giver][k][-1]],
                default=None,
            )
            if step is None:
                return None
            row = rows_DK[giver][step].pop()
            has_room_DK = (used_DK + costs.tokens_R[row] <= budget) & (places_D > 0)[:, None]
            below_DK = np.where(has_room_DK, height_K - load_DK, never)
            taker, to_step = divmod(int(below_DK.argmax()), len(height_K))
            if below_DK[taker, to_step] == never:
                return None
            target = rows_DK[taker][to_step]
            places_D[taker] -= bool(
                target
            )  # a row in an empty micro-batch takes the place of a pad
            places_D[giver] += 1
            target.append(row)
            target.sort(key=lambda row: -costs.tokens_R[row])
            for rank, k in ((giver, step), (taker, to_step)):
                tokens_I, cost_I = costs.computed(rows_DK[rank][k])
                used_DK[rank, k], load_DK[rank, k] = tokens_I.sum(), cost_I.sum()
    return Cut(
        rows_DK=rows_DK,
        time=int(load_DK.max(axis=0).sum()) + len(height_K) * costs.micro_batch_overhead,
    )
