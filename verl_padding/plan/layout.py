"""Where the rows of one worker call go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

CutBy = Literal["rows", "tokens", "verl"]
RowNumbers = tuple[int, ...]
RowsDK = Sequence[Sequence[Sequence[int]]]
"""Row numbers of each rank's micro-batches, of which all ranks have equally many; numbers from that
of real rows on are pads."""
RowsMDK = Sequence[RowsDK]
"""The same of each mini-batch."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which row goes to which mini-batch, data-parallel rank and micro-batch; an inference pass has
    one mini-batch."""

    n_rows: int
    """Real rows of the batch: they are numbered from 0, and ``n_rows + j`` is pad ``j``."""
    rows_MDK: tuple[tuple[tuple[RowNumbers, ...], ...], ...]
    """Row numbers of each micro-batch, by mini-batch and rank. The ranks of a mini-batch have
    equally many rows, and equally many micro-batches of one row or more."""
    cut_by: CutBy = "rows"
    """Whether the plan cuts micro-batches by their rows or tokens, or verl's packer cuts them, in
    the workers; then each local mini-batch is one here."""
    dropped: tuple[RowNumbers, ...] = ()
    """Real rows of each mini-batch that are in no local mini-batch, since they add nothing to its
    gradient; empty if all are in one."""

    def __post_init__(self) -> None:
        for rows_DK in self.rows_MDK:
            n_rows_DK = [[*map(len, rows_K)] for rows_K in rows_DK]
            shapes = {(sum(n_rows_K), len(n_rows_K)) for n_rows_K in n_rows_DK}
            # Workers count micro-batches by their rows: one without any would be on other ranks
            # alone, and these would wait for it.
            is_even = len(shapes) == 1 and min(map(min, n_rows_DK)) >= 1
            assert is_even, f"micro-batches of {n_rows_DK} rows"

    @property
    def n_mini_batches(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self.rows_MDK)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return len(self.rows_MDK[0])

    @cached_property
    def local_batches(self) -> tuple[tuple[RowNumbers, ...], ...]:
        """Row numbers of each local mini-batch, by mini-batch and rank."""
        return tuple(
            tuple(tuple(chain.from_iterable(rows_K)) for rows_K in rows_DK)
            for rows_DK in self.rows_MDK
        )

    @cached_property
    def local_batch_rows_M(self) -> tuple[int, ...]:
        """Rows of the local mini-batches of each mini-batch, pads among them."""
        return tuple(len(local_batches_D[0]) for local_batches_D in self.local_batches)

    @cached_property
    def n_pads(self) -> int:
        """Pads in the layout: it uses pads ``0 .. n_pads - 1``."""
        return sum(row >= self.n_rows for row in self.order)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Row numbers in the order in which the batch is handed to verl.

        verl cuts the batch into equal chunks, one a rank: for two mini-batches ((0, 1), (2, 3)) and
        ((4,), (5,)) on two ranks the order is 0 1 4 2 3 5.
        """
        by_rank = chain.from_iterable(zip(*self.local_batches, strict=True))
        return tuple(chain.from_iterable(by_rank))

    @cached_property
    def rows_M(self) -> tuple[RowNumbers, ...]:
        """Real rows of each mini-batch, over all ranks, dropped or not."""
        # Denominators and weights are those of all rows of a step, computed or not.
        dropped_M = self.dropped or ((),) * self.n_mini_batches
        held_M = (
            [row for local_batch in local_batches_D for row in local_batch if row < self.n_rows]
            for local_batches_D in self.local_batches
        )
        return tuple((*held, *dropped) for held, dropped in zip(held_M, dropped_M, strict=True))

    @cached_property
    def real_rows_M(self) -> tuple[int, ...]:
        """Number of real rows of each mini-batch, dropped or not."""
        return tuple(map(len, self.rows_M))
