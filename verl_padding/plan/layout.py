"""Where the rows of one worker call go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verl_padding.plan.errors import PlanError

Cell = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which row goes to which mini-batch and data-parallel rank; an inference pass has one mini-batch."""

    n_rows: int
    """Real rows of the batch: they are numbered from 0, and ``n_rows + j`` is pad ``j``."""

    cells: tuple[tuple[Cell, ...], ...]
    """Row numbers of each cell, by mini-batch and rank; all cells have the same length."""

    def __post_init__(self) -> None:
        if not self.cells or not self.cells[0]:
            raise PlanError("a layout has at least one mini-batch and one rank")
        for ranks in self.cells:
            if len(ranks) != len(self.cells[0]):
                raise PlanError(f"a mini-batch has {len(ranks)} ranks, the first one has {len(self.cells[0])}")
            for cell in ranks:
                if len(cell) != len(self.cells[0][0]):
                    raise PlanError(f"a cell has {len(cell)} rows, the first one has {len(self.cells[0][0])}")

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
        return len(self.order) - sum(self.real_rows_M)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Row numbers in the order in which the batch is handed to verl.

        verl cuts the batch into equal chunks, one a rank, and each chunk into equal mini-batches. With M
        mini-batches and c rows a cell, row j of a cell stands at ``rank * M * c + mini_batch * c + j``: for two
        mini-batches ((0, 1), (2, 3)) and ((4, 5), (6, 7)) on two ranks the order is 0 1 4 5 2 3 6 7.
        """
        return tuple(row for rank in range(self.dp_size) for ranks in self.cells for row in ranks[rank])

    @cached_property
    def real_rows_M(self) -> tuple[int, ...]:
        """Real rows of each mini-batch, over all ranks."""
        return tuple(sum(row < self.n_rows for cell in ranks for row in cell) for ranks in self.cells)

    @cached_property
    def reporting_ranks_M(self) -> tuple[int, ...]:
        """Ranks that hold a real row, in each mini-batch."""
        return tuple(sum(any(row < self.n_rows for row in cell) for cell in ranks) for ranks in self.cells)
