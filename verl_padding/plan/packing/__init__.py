"""Cuts mini-batches into cells and micro-batches. To add a cutter, write and register it below."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout
from verl_padding.plan.lower_bounds import mini_batch_bound
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.cells import CutByWorkers, FixedRowCount, SyncPerStep
from verl_padding.plan.packing.cutter import MicroBatchCutter
from verl_padding.plan.packing.padded_rows import PaddedRows
from verl_padding.plan.packing.sync_per_micro_batch import SyncPerMicroBatch

CUTTERS: tuple[MicroBatchCutter, ...] = (
    PaddedRows(),
    FixedRowCount(),
    CutByWorkers(),
    SyncPerStep(),
    SyncPerMicroBatch(),
)
"""The first that takes a call fills its cells; the last one takes all."""


def fill_cells(costs: CallCosts, packer: Packer, mini_batches: MiniBatches) -> Layout:
    """The layout of a call. Where rows share, it takes no longer than one that is planned as if
    they did not.

    Args:
        packer: what cuts micro-batches by tokens: verl, in the workers, or the plan.
        mini_batches: the call's, none empty; an inference pass has one.
    """
    layout = _filled(costs, packer, mini_batches, costs)
    if costs.forest is None:
        return layout
    # Where rows that share balance badly together, ranks wait longer than they save. Rows that are
    # planned as if they shared nothing may still meet in a micro-batch, and then do.
    time, without_sharing = layout_time(layout, costs), replace(costs, forest=None)
    size = mini_batches.mini_batch_rows
    if sum(_min_time(without_sharing, rows, size) for rows in mini_batches.rows_M) < time:
        other = _filled(without_sharing, packer, mini_batches, costs)
        if layout_time(other, costs) < time:
            return other
    return layout


def _min_time(costs: CallCosts, rows: Sequence[int], size: int | None) -> int:
    """A time that no layout of a mini-batch beats: of ``size`` rows, pads among them, or of as many
    as it needs."""
    call = costs.call
    pads = call.min_cell_rows(size or len(rows)) * call.dp_size - len(rows)
    bound = mini_batch_bound(costs.cost_R[np.array(rows)], call.dp_size)
    return bound + costs.micro_batch_overhead + pads * costs.pad_handling


def _filled(
    costs: CallCosts, packer: Packer, mini_batches: MiniBatches, as_computed: CallCosts
) -> Layout:
    """The layout that is balanced by ``costs``, which may leave out what rows share; by
    ``as_computed``, which does not, its micro-batches are put in order."""
    cutter = next(cutter for cutter in CUTTERS if cutter.takes(costs, packer))
    return cutter.layout(costs, mini_batches, as_computed)
