"""Where the rows of one worker call go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from verl_padding.plan.errors import PlanError
from verl_padding.plan.plural import plural

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
        if not self.cells or not self.cells[0]:
            raise PlanError("a layout has at least one mini-batch and one rank")
        for ranks, size in zip(self.cells, self.cell_rows_M, strict=True):
            if len(ranks) != self.dp_size:
                raise PlanError(
                    f"a mini-batch has {plural(len(ranks), 'rank')}, the first one has "
                    f"{self.dp_size}"
                )
            for cell in ranks:
                if len(cell) != size:
                    raise PlanError(
                        f"a cell has {plural(len(cell), 'row')}, the first one of its mini-batch "
                        f"has {size}"
                    )
        if self.micro_batch_rows is not None:
            self._check_micro_batches(self.micro_batch_rows)

    def _check_micro_batches(self, n_rows_MDK: IntsMDK) -> None:
        if [len(n_rows_DK) for n_rows_DK in n_rows_MDK] != [self.dp_size] * self.n_mini_batches:
            raise PlanError("micro_batch_rows must name every rank of every mini-batch")
        for n_rows_DK, cells in zip(n_rows_MDK, self.cells, strict=True):
            if len({len(n_rows_K) for n_rows_K in n_rows_DK}) != 1:
                raise PlanError(
                    "ranks of a mini-batch have different micro-batch counts: "
                    f"{[len(k) for k in n_rows_DK]}"
                )
            for n_rows_K, cell in zip(n_rows_DK, cells, strict=True):
                if min(n_rows_K) < 1 or sum(n_rows_K) != len(cell):
                    raise PlanError(
                        f"micro-batches of {list(n_rows_K)} rows do not cut a cell of {len(cell)}"
                    )

    def micro_batches(self, mini_batch: int, rank: int) -> list[Cell]:
        """Row numbers of each micro-batch of a cell."""
        assert self.micro_batch_rows is not None, (
            "verl's packer cuts the micro-batches of this layout"
        )
        cell, n_rows_K = self.cells[mini_batch][rank], self.micro_batch_rows[mini_batch][rank]
        return [
            cell[end - rows : end] for end, rows in zip(accumulate(n_rows_K), n_rows_K, strict=True)
        ]

    def flatten_for_pass(self) -> Layout:
        """The same ranks, order of rows and micro-batches, for a pass, which takes the whole batch
        at once."""
        steps = range(self.n_mini_batches)
        return self._of_one_mini_batch(
            [
                [rows for m in steps for rows in self.micro_batches(m, rank)]
                for rank in range(self.dp_size)
            ]
        )

    def concat(self, other: Layout) -> Layout:
        """The micro-batches of this layout of one mini-batch, and after them those of another one
        with other rows."""
        n_pads = self.n_pads
        held_DK = [
            self.micro_batches(0, rank)
            + [
                tuple(row if row < self.n_rows else row + n_pads for row in rows)
                for rows in other.micro_batches(0, rank)
            ]
            for rank in range(self.dp_size)
        ]
        return self._of_one_mini_batch(held_DK)

    def _of_one_mini_batch(self, held_DK: list[list[Cell]]) -> Layout:
        """A layout of these micro-batches, whose pads are numbered anew."""
        pads = sorted(
            {row for held_K in held_DK for rows in held_K for row in rows if row >= self.n_rows}
        )
        number = {pad: self.n_rows + place for place, pad in enumerate(pads)}
        return replace(
            self,
            cells=(
                tuple(
                    tuple(number.get(row, row) for rows in held_K for row in rows)
                    for held_K in held_DK
                ),
            ),
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
        left_out_M = self.left_out or ((),) * self.n_mini_batches
        held_M = (
            [row for cell in ranks for row in cell if row < self.n_rows] for ranks in self.cells
        )
        return tuple((*held, *left_out) for held, left_out in zip(held_M, left_out_M, strict=True))

    @cached_property
    def real_rows_M(self) -> tuple[int, ...]:
        """How many these are."""
        return tuple(map(len, self.rows_M))

    @cached_property
    def reporting_ranks_M(self) -> tuple[int, ...]:
        """Ranks that hold a real row, in each mini-batch."""
        return tuple(
            sum(any(row < self.n_rows for row in cell) for cell in ranks) for ranks in self.cells
        )
