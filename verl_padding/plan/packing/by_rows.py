"""Cuts cells into micro-batches of a fixed number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.packing.balance import balance
from verl_padding.plan.packing.cell_size import extra_cost
from verl_padding.plan.packing.pads import FilledCells


def cut_by_rows(costs: CallCosts, rows_D: Sequence[Sequence[int]], size: int) -> FilledCells:
    """Cuts the cells of a mini-batch, the costliest micro-batch first.

    Micro-batches of about the same cost need the least memory. If they are in the same order on all ranks, ranks that
    meet at each wait least. None holds only pads while there are rows for all.

    Args:
        rows_D: real rows of each rank.
        size: rows of a cell, pads among them; a multiple of the rows of a micro-batch.
    """
    micro_rows = costs.call.micro_batch_rows
    rows_DK = []
    for rows in rows_D:
        extra_I = extra_cost(costs, rows)
        bins = balance(extra_I, size // micro_rows, micro_rows)
        bins = [bins[number] for number in np.argsort([-extra_I[items].sum() for items in bins], kind="stable")]
        rows_DK.append([[rows[item] for item in items] for items in bins])
    pads_DK = [[micro_rows - len(rows) for rows in rows_K] for rows_K in rows_DK]
    return FilledCells(rows_DK=rows_DK, pads_DK=pads_DK)


def leave_uncut(rows_D: Sequence[Sequence[int]], size: int) -> FilledCells:
    """The cells of a mini-batch, each in one piece: the workers cut them."""
    return FilledCells(rows_DK=[[list(rows)] for rows in rows_D], pads_DK=[[size - len(rows)] for rows in rows_D])
