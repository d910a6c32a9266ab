"""Cuts mini-batches into cells and micro-batches. To add a cutter, write and register it below."""

from dataclasses import replace

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
    """The layout of a call: where rows share, one that takes no longer than what sharing less would
    have given.

    Args:
        packer: what cuts micro-batches by tokens: verl, in the workers, or the plan.
        mini_batches: the call's, none empty; an inference pass has one.
    """
    best = _filled(costs, packer, mini_batches, costs)
    if costs.forest is None:
        return best
    best_time = layout_time(best, costs)
    for forest in costs.forest.sharing_less():
        less = replace(costs, forest=forest)
        cost_M = [less.computed(rows)[1] for rows in mini_batches.rows_M]
        if sum(mini_batch_bound(cost_I, costs.call.dp_size) for cost_I in cost_M) < best_time:
            layout = _filled(less, packer, mini_batches, costs)
            if (time := layout_time(layout, costs)) < best_time:
                best, best_time = layout, time
    return best


def _filled(
    costs: CallCosts, packer: Packer, mini_batches: MiniBatches, as_computed: CallCosts
) -> Layout:
    """The layout by some costs; ``as_computed`` know all that the workers will share in it."""
    cutter = next(cutter for cutter in CUTTERS if cutter.takes(costs, packer))
    return cutter.layout(costs, mini_batches, as_computed)
