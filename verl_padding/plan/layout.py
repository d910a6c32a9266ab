"""Where the rows of one worker call go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from verl_padding.plan.counted import counted
from verl_padding.plan.errors import PlanError

Cell = tuple[int, ...]
IntsMDK = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which row goes to which mini-batch and data-parallel rank; an inference pass has one mini-batch."""

    n_rows: int
    """Real rows of the batch: they are numbered from 0, and ``n_rows + j`` is pad ``j``."""
    cells: tuple[tuple[Cell, ...], ...]
    """Row numbers of each cell, by mini-batch and rank; all cells have the same length."""
    micro_batch_rows: IntsMDK | None = None
    """Rows of each micro-batch, by mini-batch and rank, in the order of the cell; the ranks of a mini-batch have
    the same number of micro-batches, each of one row or more. None if verl's packer cuts them in the workers."""
    micro_batch_multiple: int = 1
    """The number of micro-batches of a mini-batch that are computed is a multiple of this."""
    of_update: bool = False
    """Whether an update is laid out, which owes nobody an output of a pad; a pass does."""
    left_out: tuple[Cell, ...] = ()
    """Real rows of each mini-batch that are in no cell, since they add nothing to its gradient; none if all are in."""

    def __post_init__(self) -> None:
        if not self.cells or not self.cells[0]:
            raise PlanError("a layout has at least one mini-batch and one rank")
        for ranks in self.cells:
            if len(ranks) != self.dp_size:
                raise PlanError(f"a mini-batch has {counted(len(ranks), 'rank')}, the first one has {self.dp_size}")
            for cell in ranks:
                if len(cell) != self.rows_per_cell:
                    raise PlanError(f"a cell has {counted(len(cell), 'row')}, the first one has {self.rows_per_cell}")
        if self.micro_batch_rows is not None:
            self._check_micro_batches(self.micro_batch_rows)

    def _check_micro_batches(self, n_rows_MDK: IntsMDK) -> None:
        if [len(n_rows_DK) for n_rows_DK in n_rows_MDK] != [self.dp_size] * self.n_mini_batches:
            raise PlanError("micro_batch_rows must name every rank of every mini-batch")
        for n_rows_DK in n_rows_MDK:
            if len({len(n_rows_K) for n_rows_K in n_rows_DK}) != 1:
                raise PlanError(
                    f"ranks of a mini-batch have different micro-batch counts: {[len(k) for k in n_rows_DK]}"
                )
            for n_rows_K in n_rows_DK:
                if min(n_rows_K) < 1 or sum(n_rows_K) != self.rows_per_cell:
                    raise PlanError(f"micro-batches of {list(n_rows_K)} rows do not cut a cell of {self.rows_per_cell}")

    def micro_batches(self, mini_batch: int, rank: int) -> list[Cell]:
        """Row numbers of each micro-batch of a cell."""
        assert self.micro_batch_rows is not None, "verl's packer cuts the micro-batches of this layout"
        cell, n_rows_K = self.cells[mini_batch][rank], self.micro_batch_rows[mini_batch][rank]
        return [cell[end - rows : end] for end, rows in zip(accumulate(n_rows_K), n_rows_K, strict=True)]

    @cached_property
    def skipped_M(self) -> tuple[frozenset[int], ...]:
        """Micro-batches of each mini-batch of an update that hold pads alone on every rank: no rank computes them."""
        if self.micro_batch_rows is None or not self.of_update:
            return (frozenset(),) * self.n_mini_batches
        skipped_M = []
        for m in range(self.n_mini_batches):
            levels = zip(*(self.micro_batches(m, rank) for rank in range(self.dp_size)), strict=True)
            of_pads = [k for k, rows_D in enumerate(levels) if min(map(min, rows_D)) >= self.n_rows]
            first = len(of_pads) % self.micro_batch_multiple
            skipped_M.append(frozenset(of_pads[first:]))
        return tuple(skipped_M)

    def as_one_mini_batch(self, most_pads: int) -> Layout:
        """The same ranks, order of rows and micro-batches, for a pass, which takes the whole batch at once.

        Of the pads that the update does not compute, it has as few as make its cells even, at the end, at most
        ``most_pads`` in a micro-batch: a pass owes outputs of all its rows.
        """
        assert self.micro_batch_rows is not None, "verl's packer cuts the micro-batches of this layout"
        held_DK: list[list[Cell]] = [[] for _ in range(self.dp_size)]
        spare_D: list[list[int]] = [[] for _ in range(self.dp_size)]
        for m, skipped in enumerate(self.skipped_M):
            for rank in range(self.dp_size):
                for k, rows in enumerate(self.micro_batches(m, rank)):
                    if k in skipped:
                        spare_D[rank] += rows
                    else:
                        held_DK[rank].append(rows)
        missing_D = [len(spare) - min(map(len, spare_D)) for spare in spare_D]
        levels = 0
        while levels * most_pads < max(missing_D) + levels:  # each rank has a pad in each
            levels += self.micro_batch_multiple
        for held_K, spare, missing in zip(held_DK, spare_D, missing_D, strict=True):
            pads = spare[: missing + levels]
            held_K += [tuple(pads[level::levels]) for level in range(levels)]
        return self._of_one_mini_batch(held_DK)

    def followed_by(self, other: Layout) -> Layout:
        """The micro-batches of this layout of one mini-batch, and after them those of another one with other rows."""
        first_pad = self.n_rows + self.n_pads
        held_DK = [
            self.micro_batches(0, rank)
            + [
                tuple(row if row < self.n_rows else row - self.n_rows + first_pad for row in rows)
                for rows in other.micro_batches(0, rank)
            ]
            for rank in range(self.dp_size)
        ]
        return self._of_one_mini_batch(held_DK)

    def _of_one_mini_batch(self, held_DK: list[list[Cell]]) -> Layout:
        """A layout of these micro-batches, whose pads are numbered anew."""
        pads = sorted({row for held_K in held_DK for rows in held_K for row in rows if row >= self.n_rows})
        number = {pad: self.n_rows + place for place, pad in enumerate(pads)}
        return replace(
            self,
            cells=(tuple(tuple(number.get(row, row) for rows in held_K for row in rows) for held_K in held_DK),),
            micro_batch_rows=(tuple(tuple(map(len, held_K)) for held_K in held_DK),),
            left_out=(),
            of_update=False,
        )

    @property
    def n_micro_batches(self) -> int | None:
        """Micro-batches that a rank computes, summed over the mini-batches; None if verl's packer cuts them."""
        if self.micro_batch_rows is None:
            return None
        of_ranks_M = zip(self.micro_batch_rows, self.skipped_M, strict=True)
        return sum(len(n_rows_DK[0]) - len(skipped) for n_rows_DK, skipped in of_ranks_M)

    @property
    def n_mini_batches(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self.cells)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return len(self.cells[0])

    @property
    def rows_per_cell(self) -> int:
        """Rows of every cell, pads among them."""
        return len(self.cells[0][0])

    @property
    def n_pads(self) -> int:
        """Pads in the layout: it uses pads ``0 .. n_pads - 1``."""
        return sum(row >= self.n_rows for row in self.order)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Row numbers in the order in which the batch is handed to verl.

        verl cuts the batch into equal chunks, one a rank, and each chunk into equal mini-batches. With M mini-batches
        and c rows a cell, row j of a cell stands at ``rank * M * c + mini_batch * c + j``: for two mini-batches
        ((0, 1), (2, 3)) and ((4, 5), (6, 7)) on two ranks the order is 0 1 4 5 2 3 6 7.
        """
        return tuple(row for rank in range(self.dp_size) for ranks in self.cells for row in ranks[rank])

    @cached_property
    def rows_M(self) -> tuple[Cell, ...]:
        """Real rows of each mini-batch, over all ranks, also those that are left out."""
        left_out_M = self.left_out or ((),) * self.n_mini_batches
        held_M = ([row for cell in ranks for row in cell if row < self.n_rows] for ranks in self.cells)
        return tuple((*held, *left_out) for held, left_out in zip(held_M, left_out_M, strict=True))

    @cached_property
    def real_rows_M(self) -> tuple[int, ...]:
        """How many these are."""
        return tuple(map(len, self.rows_M))

    @cached_property
    def reporting_ranks_M(self) -> tuple[int, ...]:
        """Ranks that hold a real row, in each mini-batch."""
        return tuple(sum(any(row < self.n_rows for row in cell) for cell in ranks) for ranks in self.cells)
