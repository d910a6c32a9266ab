"""Cuts mini-batches into local mini-batches and micro-batches. To add a cutter, write it and choose
it below."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.calls import Call, Packer
from verl_padding.plan.layout import CutBy, Layout, RowsDK
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.local_mini_batches import (
    fixed_row_count,
    sync_per_step,
    whole_local_batches,
)
from verl_padding.plan.packing.rectangles import cut_rectangles
from verl_padding.plan.packing.sync_per_micro_batch import cut_micro_steps

MicroBatchCutter = Callable[[CallCosts, Sequence[int], int | None], RowsDK]
"""Assigns the rows of a mini-batch, one at least, to ranks and micro-batches, and pads to what is
left of local mini-batches of a given size, or of the size that takes the least time."""


def fill_local_batches(
    costs: CallCosts, packer: Packer, mini_batches: MiniBatches, first_pad: int | None = None
) -> Layout:
    """The layout of a call: pads are numbered by mini-batch, rank and micro-batch.

    Args:
        packer: what cuts micro-batches by tokens: verl, in the workers, or the plan.
        mini_batches: the call's, none empty; an inference pass has one.
        first_pad: number of the first pad; that behind the real rows by default.
    """
    fixed = mini_batches.mini_batch_rows
    size = None if fixed is None else costs.call.min_local_batch_rows(fixed)
    rows_MDK = [_local_batches(costs, packer, rows, size) for rows in mini_batches.rows_M]
    by_tokens: CutBy = "tokens" if packer == "plan" else "verl"
    cut_by = "rows" if costs.call.token_budget is None else by_tokens
    if cut_by != "verl":
        rows_MDK = [_in_order(costs, rows_DK) for rows_DK in rows_MDK]
    pads = count(first_pad or costs.n_rows)

    def numbered(rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(row if row < costs.n_rows else next(pads) for row in sorted(rows))

    return Layout(
        n_rows=costs.n_rows,
        rows_MDK=tuple(
            tuple(tuple(map(numbered, rows_K)) for rows_K in rows_DK) for rows_DK in rows_MDK
        ),
        cut_by=cut_by,
        dropped=mini_batches.dropped_M,
    )


def _local_batches(
    costs: CallCosts, packer: Packer, rows: Sequence[int], size: int | None
) -> RowsDK:
    """The local mini-batches of a mini-batch, of ``size`` rows, pads among them. Where rows share,
    they take no longer than those that are planned as if they did not."""
    # Where rows that share balance badly together, ranks wait longer than they save. Rows that are
    # planned as if they shared nothing may still meet in a micro-batch, and then do: where that
    # takes more than the token budget, this plan is none.
    rows_DK = _cutter(costs.call, packer)(replace(costs, tries=None), rows, size)
    if costs.tries is None:
        return rows_DK
    _, used_DK, _ = costs.micro_batch_loads(rows_DK)
    fits = used_DK.max() <= costs.token_budget
    return cut_micro_steps(costs, rows, size, best=rows_DK if fits else None)


def _cutter(call: Call, packer: Packer) -> MicroBatchCutter:
    """The cutter of calls whose rows share nothing."""
    if call.padded_to != "row":
        return cut_rectangles
    if call.token_budget is None:
        return fixed_row_count
    if packer == "verl":
        return whole_local_batches
    return sync_per_step if call.sync_point == "mini_batch" else cut_micro_steps


def _in_order(costs: CallCosts, rows_DK: RowsDK) -> RowsDK:
    """The micro-batches in the order of the most tokens that a rank computes in them, on all ranks
    alike.

    Memory then runs out early, if it does: by the second one, beside the first gradients. Pipelines
    fill and drain with the smallest, as verl has it (``rearrange_micro_batches``).
    """
    tokens_DK, _, _ = costs.micro_batch_loads(rows_DK)
    order_K = np.argsort(-tokens_DK.max(axis=0), kind="stable").tolist()
    if costs.call.has_pipeline:
        # 9 8 7 6 5 become 5 7 9 8 6.
        order_K = order_K[::2][::-1] + order_K[1::2]
    return [[rows_K[k] for k in order_K] for rows_K in rows_DK]
