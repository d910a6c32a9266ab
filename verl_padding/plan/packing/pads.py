"""Cells that have been filled: which rank has which rows and how many pads, micro-batch by micro-batch.

All pads find their places here: where every micro-batch has a fixed number of places, they take those that are left;
where micro-batches are cut by tokens, those where ranks wait for others come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Cell, Layout

Item = TypeVar("Item")
RowsDK = list[list[list[int]]]
"""Row numbers of each rank's micro-batches; all ranks have equally many."""


@dataclass(frozen=True, kw_only=True)
class FilledCells:
    """The cells of a mini-batch, all of one size; every rank has the same number of micro-batches."""

    rows_DK: RowsDK
    pads_DK: list[list[int]]
    """Pads of each rank's micro-batches."""
    time: int = 0
    """Cost of the slowest rank, summed over the micro-batches, plus their handling; 0 where it is not compared."""

    @classmethod
    def filled_up(cls, rows_DK: RowsDK, places_K: Sequence[int]) -> FilledCells:
        """Fills micro-batch k of each rank up to its number of places."""
        return cls(
            rows_DK=rows_DK,
            pads_DK=[[n - len(rows) for n, rows in zip(places_K, rows_K, strict=True)] for rows_K in rows_DK],
        )


def least_rows(rows_DK: RowsDK) -> int:
    """Rows that a cell needs: the fullest rank's, with a pad in each micro-batch without rows."""
    return max(sum(max(len(rows), 1) for rows in rows_K) for rows_K in rows_DK)


def pads_in_room(costs: CallCosts, rows_DK: RowsDK, size: int) -> list[list[int]] | None:
    """How many pads go into each rank's micro-batches, which hold as many tokens as the budget allows.

    Args:
        size: rows of a cell, pads among them.

    Returns:
        The pads; None if there is no room for all.
    """
    if least_rows(rows_DK) > size:
        return None
    assert costs.call.token_budget is not None
    tokens_DK, load_DK = costs.sums(rows_DK)
    room_DK = (costs.call.token_budget - tokens_DK) // costs.pad_tokens
    below_DK = (load_DK.max(axis=0) - load_DK) // max(costs.pad, 1)
    pads_DK = []
    for rows_K, room_K, below_K in zip(rows_DK, room_DK.tolist(), below_DK.tolist(), strict=True):
        pads_K = [0 if rows else 1 for rows in rows_K]
        left = size - sum(map(len, rows_K)) - sum(pads_K)
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


def blocks(rows: Sequence[int], n_blocks: int, size: int, *, spread_pads: bool) -> list[list[int]]:
    """Cuts rows, longest first, into blocks of ``size`` places; the last places of the last blocks are for pads.

    Args:
        spread_pads: no block may hold only pads while there are rows for all.
    """
    pads = n_blocks * size - len(rows)
    most = size - 1 if spread_pads else size
    pads_B = [0] * n_blocks
    for block in reversed(range(n_blocks)):
        # With fewer rows than blocks, those that are left without one hold pads alone.
        pads_B[block] = min(pads, size if block >= len(rows) else most)
        pads -= pads_B[block]
    ends = np.cumsum([size - pads for pads in pads_B]).tolist()
    return [list(rows[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def cheap_at_both_ends(costly_first_K: list[Item]) -> list[Item]:
    """verl's order of micro-batches (``rearrange_micro_batches``): a pipeline fills and drains with cheap ones."""
    return costly_first_K[::2][::-1] + costly_first_K[1::2]


def layout_of(cells_M: Sequence[FilledCells], n_rows: int, *, with_micro_batches: bool) -> Layout:
    """Numbers the pads, by mini-batch, rank and micro-batch.

    Args:
        cells_M: cells of each mini-batch.
        n_rows: real rows of the batch; pads are numbered from there on.
        with_micro_batches: False where the workers cut them.
    """
    next_pad = count(n_rows)
    cells, micro_batch_rows = [], []
    for filled in cells_M:
        ranks = list(zip(filled.rows_DK, filled.pads_DK, strict=True))
        cells.append(tuple(_cell_of(rows_K, pads_K, next_pad) for rows_K, pads_K in ranks))
        micro_batch_rows.append(
            tuple(tuple(len(r) + p for r, p in zip(rows_K, pads_K, strict=True)) for rows_K, pads_K in ranks)
        )
    return Layout(
        n_rows=n_rows,
        cells=tuple(cells),
        micro_batch_rows=tuple(micro_batch_rows) if with_micro_batches else None,
    )


def _cell_of(rows_K: Sequence[Sequence[int]], pads_K: Sequence[int], next_pad: Iterator[int]) -> Cell:
    """The rows of a cell, micro-batch after micro-batch, rows before pads."""
    cell: list[int] = []
    for rows, pads in zip(rows_K, pads_K, strict=True):
        cell += sorted(rows)
        cell += [next(next_pad) for _ in range(pads)]
    return tuple(cell)
