"""Cuts cells into micro-batches of a fixed number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.balance import balance
from verl_padding.plan.packing.cell_size import balanced_cells, extra_cost
from verl_padding.plan.packing.pads import FilledCells
from verl_padding.plan.packing.way import Way


class ByRows(Way):
    """Micro-batches of about the same cost need the least memory.

    If they are in the same order on all ranks, the costliest first, ranks that meet at each wait least. None holds only
    pads while there are rows for all.
    """

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return costs.call.token_budget is None

    def fill(self, costs: CallCosts, mini_batches: MiniBatches) -> list[FilledCells]:
        size, rows_MD = balanced_cells(costs, mini_batches)
        micro_rows = costs.call.micro_batch_rows
        n_micro = size // micro_rows
        return [
            FilledCells.filled_up([_cut(costs, rows, n_micro) for rows in rows_D], [micro_rows] * n_micro)
            for rows_D in rows_MD
        ]


def _cut(costs: CallCosts, rows: Sequence[int], n_micro: int) -> list[list[int]]:
    """The micro-batches of a rank, the costliest first."""
    extra_I = extra_cost(costs, rows)
    bins = balance(extra_I, n_micro, costs.call.micro_batch_rows)
    costliest_first = np.argsort([-extra_I[items].sum() for items in bins], kind="stable")
    return [[rows[item] for item in bins[number]] for number in costliest_first]
