"""A mini-batch that has been dealt out: which rank has which rows and how many pads, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from verl_padding.plan.layout import Cell, Layout


@dataclass(frozen=True, kw_only=True)
class FilledCells:
    """The cells of a mini-batch, all of one size; every rank has the same number of micro-batches."""

    rows_DK: list[list[list[int]]]
    """Row numbers of each rank's micro-batches."""

    pads_DK: list[list[int]]
    """Pads of each rank's micro-batches."""

    time: int = 0
    """Cost of the slowest rank, summed over the micro-batches, plus their handling; 0 where it is not compared."""


def layout_of(cells_M: Sequence[FilledCells], n_rows: int, *, with_micro_batches: bool = True) -> Layout:
    """Numbers the pads, by mini-batch, rank and micro-batch.

    Args:
        cells_M: cells of each mini-batch.
        n_rows: real rows of the batch; pads are numbered from there on.
        with_micro_batches: False where the workers cut them.
    """
    next_pad = count(n_rows)
    cells = tuple(
        tuple(_cell_of(rows_K, pads_K, next_pad) for rows_K, pads_K in zip(filled.rows_DK, filled.pads_DK, strict=True))
        for filled in cells_M
    )
    if not with_micro_batches:
        return Layout(n_rows=n_rows, cells=cells)
    micro_batch_rows = tuple(
        tuple(
            tuple(len(rows) + pads for rows, pads in zip(rows_K, pads_K, strict=True))
            for rows_K, pads_K in zip(filled.rows_DK, filled.pads_DK, strict=True)
        )
        for filled in cells_M
    )
    return Layout(n_rows=n_rows, cells=cells, micro_batch_rows=micro_batch_rows)


def _cell_of(rows_K: Sequence[Sequence[int]], pads_K: Sequence[int], next_pad: Iterator[int]) -> Cell:
    """The rows of a cell, micro-batch after micro-batch, rows before pads."""
    cell: list[int] = []
    for rows, pads in zip(rows_K, pads_K, strict=True):
        cell += sorted(rows)
        cell += [next(next_pad) for _ in range(pads)]
    return tuple(cell)
