"""Where the rows of one worker call go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

Cell = tuple[int, ...]
IntsMDK = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which row goes to which mini-batch and data-parallel rank; an inference pass has one
    mini-batch."""

    n_rows: int
    """Real rows of the batch: they are numbered from 0, and ``n_rows + j`` is pad ``j``."""
    cells: tuple[tuple[Cell, ...], ...]
    """Row numbers of each cell, by mini-batch and rank; those of a mini-batch have the same
    length."""
    micro_batch_rows: IntsMDK | None = None
    """Rows of each micro-batch, by mini-batch and rank, in the order of the cell; the ranks of a
    mini-batch have the same number of micro-batches, each of one row or more. None if verl's packer
    cuts them in the workers."""
    by_tokens: bool = False
    """Whether micro-batches were cut by their tokens."""
    left_out: tuple[Cell, ...] = ()
    """Real rows of each mini-batch that are in no cell, since they add nothing to its gradient;
    none if all are in."""

    def __post_init__(self) -> None:
        for ranks, size in zip(self.cells, self.cell_rows_M, strict=True):
            rows_D = [*map(len, ranks)]
            assert rows_D == [size] * self.dp_size, f"cells of {rows_D} rows in a mini-batch"
        if self.micro_batch_rows is None:
            return
        for ranks, n_rows_DK in zip(self.cells, self.micro_batch_rows, strict=True):
            assert len(set(map(len, n_rows_DK))) == 1, f"micro-batches of {n_rows_DK} rows"
            # Workers count micro-batches by their rows: one without any would be on other ranks
            # alone, and these would wait for it.
            assert min(map(min, n_rows_DK)) >= 1, f"micro-batches of {n_rows_DK} rows"
            assert [*map(sum, n_rows_DK)] == [*map(len, ranks)], "micro-batches cut their cells"

    def micro_batches(self, mini_batch: int, rank: int) -> list[Cell]:
        """Row numbers of each micro-batch of a cell."""
        assert self.micro_batch_rows is not None, (
            "verl's packer cuts the micro-batches of this layout"
        )
        # The cell (3, 5, 8, 9) with (1, 3) rows has the micro-batches (3,) and (5, 8, 9).
        cell, n_rows_K = self.cells[mini_batch][rank], self.micro_batch_rows[mini_batch][rank]
        return [
            cell[end - rows : end] for end, rows in zip(accumulate(n_rows_K), n_rows_K, strict=True)
        ]

    def flatten_for_pass(self) -> Layout:
        """The same ranks, order of rows and micro-batches, for a pass, which takes the whole batch
        at once."""
        # Two mini-batches, whose micro-batches of rank 0 are (0, 1) (2) and (5), become one with
        # (0, 1) (2) (5).
        return self._with_micro_batches(self._held_DK())

    def concat(self, other: Layout) -> Layout:
        """The micro-batches of this layout of one mini-batch, and after them those of another one
        with other rows."""
        # Of five rows and one pad, 5, this layout's; the other one's pads 5 and 6 become 6 and 7.
        n_pads, pads_begin = self.n_pads, self.n_rows
        behind_DK = [
            [tuple(row if row < pads_begin else row + n_pads for row in rows) for rows in held_K]
            for held_K in other._held_DK()
        ]
        held = zip(self._held_DK(), behind_DK, strict=True)
        return self._with_micro_batches([first + behind for first, behind in held])

    def _held_DK(self) -> list[list[Cell]]:
        """The micro-batches of each rank, of all mini-batches."""
        steps = range(self.n_mini_batches)
        return [
            [rows for step in steps for rows in self.micro_batches(step, rank)]
            for rank in range(self.dp_size)
        ]

    def _with_micro_batches(self, held_DK: list[list[Cell]]) -> Layout:
        """A layout of one mini-batch with these micro-batches, whose pads are numbered anew."""
        cells_D = [tuple(row for rows in held_K for row in rows) for held_K in held_DK]
        pads = sorted(row for cell in cells_D for row in cell if row >= self.n_rows)
        number = {pad: self.n_rows + place for place, pad in enumerate(pads)}
        return replace(
            self,
            cells=(tuple(tuple(number.get(row, row) for row in cell) for cell in cells_D),),
            micro_batch_rows=(tuple(tuple(map(len, held_K)) for held_K in held_DK),),
            left_out=(),
        )

    @property
    def n_micro_batches(self) -> int | None:
        """Micro-batches that a rank computes, summed over the mini-batches; None if verl's packer
        cuts them."""
        if self.micro_batch_rows is None:
            return None
        return sum(len(n_rows_DK[0]) for n_rows_DK in self.micro_batch_rows)

    @property
    def n_mini_batches(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self.cells)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return len(self.cells[0])

    @cached_property
    def cell_rows_M(self) -> tuple[int, ...]:
        """Rows of the cells of each mini-batch, pads among them."""
        return tuple(len(ranks[0]) for ranks in self.cells)

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
        return tuple(
            row for rank in range(self.dp_size) for ranks in self.cells for row in ranks[rank]
        )

    @cached_property
    def rows_M(self) -> tuple[Cell, ...]:
        """Real rows of each mini-batch, over all ranks, also those that are left out."""
        # Denominators and weights are those of all rows of a step, computed or not.
        left_out_M = self.left_out or ((),) * self.n_mini_batches
        held_M = (
            [row for cell in ranks for row in cell if row < self.n_rows] for ranks in self.cells
        )
        return tuple((*held, *left_out) for held, left_out in zip(held_M, left_out_M, strict=True))

    @cached_property
    def real_rows_M(self) -> tuple[int, ...]:
        """How many these are."""
        return tuple(map(len, self.rows_M))
