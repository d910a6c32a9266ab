"""Balances ranks alone: verl's packer cuts the cells into micro-batches, in the workers."""

from __future__ import annotations

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.cell_size import balanced_cells
from verl_padding.plan.packing.pads import FilledCells
from verl_padding.plan.packing.way import Way


class Uncut(Way):
    """Each cell is in one piece."""

    cuts_micro_batches = False

    def takes(self, costs: CallCosts, packer: Packer) -> bool:
        return packer == "verl"

    def fill(self, costs: CallCosts, mini_batches: MiniBatches) -> list[FilledCells]:
        size, rows_MD = balanced_cells(costs, mini_batches)
        return [FilledCells.filled_up([[rows] for rows in rows_D], [size]) for rows_D in rows_MD]
