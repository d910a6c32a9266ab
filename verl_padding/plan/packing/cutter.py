"""What a cutter must provide."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.pads import Cut, layout_of_cuts


class MicroBatchCutter(ABC):
    """Assigns the rows of mini-batches to ranks and micro-batches, and pads to what is left of the
    cells."""

    cuts_micro_batches = True
    """False if the workers cut the cells."""

    @abstractmethod
    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        """Whether it fills the cells of this call."""

    @abstractmethod
    def fill(self, costs: CallCosts, rows: Sequence[int], size: int | None) -> Cut:
        """The cells of a mini-batch of these rows, one at least: of ``size`` rows, pads among them,
        or of as many as take the least time."""

    def layout(self, costs: CallCosts, mini_batches: MiniBatches, as_computed: CallCosts) -> Layout:
        """The layout of a call, filled by ``costs``; micro-batches are in the order of what is
        computed of them."""
        fixed = mini_batches.mini_batch_rows
        size = None if fixed is None else costs.call.min_cell_rows(fixed)
        cells_M = [self.fill(costs, rows, size) for rows in mini_batches.rows_M]
        return layout_of_cuts(cells_M, as_computed, with_micro_batches=self.cuts_micro_batches)
