"""Deals the rows of each mini-batch out to the ranks, and fills the cells with pads. Each way to do it is a module."""

from __future__ import annotations

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.by_cell import cut_by_cell
from verl_padding.plan.packing.by_level import cut_by_level
from verl_padding.plan.packing.by_rows import cut_by_rows, leave_uncut
from verl_padding.plan.packing.cell_size import balanced_cells, least_size
from verl_padding.plan.packing.pads import layout_of
from verl_padding.plan.packing.rectangles import cut_rectangles


def deal(costs: CallCosts, packer: Packer, mini_batches: MiniBatches) -> Layout:
    """The layout of a call.

    Args:
        costs: the call's.
        packer: what cuts micro-batches by tokens: verl, in the workers, or the plan.
        mini_batches: the call's, none empty; an inference pass has one.
    """
    call, rows_M, fixed = costs.call, mini_batches.rows_M, mini_batches.mini_batch_rows
    size = least_size(costs, rows_M) if fixed is None else fixed // call.dp_size
    if call.padded_to != "row":
        return layout_of([cut_rectangles(costs, rows, size) for rows in rows_M], costs.n_rows)
    may_grow = fixed is None and call.token_budget is not None
    # Balanced cells do not know what a chain costs: with chains they only make sure that there is a plan.
    size, rows_MD = balanced_cells(costs, rows_M, size, may_grow=may_grow and costs.chain_R is None)
    if call.token_budget is None:
        return layout_of([cut_by_rows(costs, rows_D, size) for rows_D in rows_MD], costs.n_rows)
    if packer == "verl":
        cells_M = [leave_uncut(rows_D, size) for rows_D in rows_MD]
        return layout_of(cells_M, costs.n_rows, with_micro_batches=False)
    # Cells that are cut by themselves know nothing of chains. Levels do, and what balances them balances cells, too.
    if call.ranks_meet == "mini_batch" and costs.chain_R is None:
        return layout_of([cut_by_cell(costs, rows_D, size) for rows_D in rows_MD], costs.n_rows)
    return layout_of(cut_by_level(costs, rows_M, rows_MD, size, may_grow=may_grow), costs.n_rows)
