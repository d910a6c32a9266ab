"""Columns that worker calls carry beside the rows' own fields."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_padding.plan import BatchPlan, Layout

IS_PADDING = "is_padding"
"""Column (R,) in an update, and in a pass with pads: whether the row is a pad."""
LOSS_ROWS = "mini_batch_loss_rows"
"""Column (R,) in an update: rows of the row's mini-batch that have a token with a loss, by their
``loss_mask``, over all ranks, also of rows that are left out."""
LOSS_TOKENS = "mini_batch_loss_tokens"
"""Column (R,) in an update: trained tokens of the row's mini-batch, those that its
``response_mask`` keeps; none of rows that are left out."""
TRAINED_ROWS = "mini_batch_trained_rows"
"""Column (R,) in an update: rows that have some of these tokens, over all ranks."""
REPORTING_RANKS = "mini_batch_reporting_ranks"
"""Column (R,) in an update: data-parallel ranks that hold a trained token of the row's
mini-batch."""
ALL_TOKENS = "mini_batch_all_tokens"
"""Column (R,) in an update that may leave rows out: tokens with a loss of all rows of the row's
mini-batch, by their ``loss_mask``, which verl divides by."""
ALL_LOSS_TOKENS = "mini_batch_all_loss_tokens"
"""Column (R,) in an update that may leave rows out: as :data:`LOSS_TOKENS`, with those of rows that
are left out."""
LOSS_FACTOR = "loss_factor"
"""Column (R,) in an update whose rows weigh differently: what the gradient of the row's outputs is
multiplied by (:mod:`~verl_padding.pads.loss_weighting`); 0 for a pad."""
MICRO_BATCH = "micro_batch"
"""Column (R,) in every call whose micro-batches the plan cuts by tokens (:data:`CUT_BY_PLAN`):
number of the row's micro-batch among those of its cell."""
MINI_BATCH = "mini_batch_number"
"""Column (R,) in an update: number of the row's mini-batch."""
DFS_POSITION = "dfs_position"
"""Column (R,) in calls that share: place of the row among those of the batch, so that a row shares
most with the one before it; -1 for a pad."""
BATCH_ROW = "batch_row"
"""Column (R,) in calls whose micro-batches are timed: the row's number in the batch; -1 for a
pad."""
OF_ALL_ROWS = (ALL_TOKENS, ALL_LOSS_TOKENS)
OF_MINI_BATCH = (MINI_BATCH, LOSS_ROWS, LOSS_TOKENS, TRAINED_ROWS, REPORTING_RANKS, *OF_ALL_ROWS)
INTEGERS = (*OF_MINI_BATCH, MICRO_BATCH, DFS_POSITION, BATCH_ROW)
COLUMN_DTYPES = {IS_PADDING: torch.bool, LOSS_FACTOR: torch.float64} | dict.fromkeys(
    INTEGERS, torch.int64
)
OWN_COLUMNS = frozenset(COLUMN_DTYPES)

DENOMINATOR = "denominator"
"""Key of an update's ``extra_info``: ``padding.denominator``."""
WEIGHS_ROWS = "weighs_rows"
"""Key of ``extra_info`` of an update whose rows weigh differently. Without it no loss reads
:data:`LOSS_FACTOR`: a row may have that from an earlier update, while the pads of this one have
none."""
LEAVES_OUT = "leaves_out"
"""Key of ``extra_info`` of an update that may leave rows out, and so has the columns of
:data:`OF_ALL_ROWS`."""
OLD_LOG_PROBS_OF_UPDATE = "old_log_probs_of_update"
"""Key of ``extra_info`` of an update that takes its own log-probs for the old policy's."""
CUT_BY_PLAN = "cut_by_plan"
"""Key of a call's ``extra_info``: whether it has :data:`MICRO_BATCH`; rows may have that from
another call."""
BRANCHES = "branches"
"""Key of a call's ``extra_info`` where rows share tokens: whether they share those before they
part, too."""
OPTIMIZER_STEPS = "optimizer_steps"
"""Key of an update's ``extra_info``: of each optimizer step that is to come, its mini-batch's
number and the rows of a cell."""
TIMED_CALL = "timed_call"
"""Key of a timed call's ``extra_info``: its name in the plan."""
NO_ADAPTER, REF = "no_lora_adapter", "ref"
"""verl's key in ``extra_info`` of a pass of a LoRA actor as its own reference, and what that is
called in timings."""


def read_column(data: TensorDict, name: str) -> torch.Tensor:
    """A column (R,) of worker data of R rows."""
    return data[name].reshape(len(data))


def cut_into(layout: Layout, *, epochs: int) -> dict[str, Any]:
    """What makes verl's workers cut the rows of a rank into consecutive mini-batches.

    Two rows and three are ``{"dataloader_kwargs": {"batch_sampler": [range(0, 2), range(2, 5)]},
    ..}``. A DataLoader takes that only beside a batch size of 1, and verl's is the rows over
    ``num_mini_batch``.
    """
    ends = [0, *accumulate(layout.cell_rows_M)]
    sampler = [range(begin, end) for begin, end in pairwise(ends)]
    return {
        "num_mini_batch": ends[-1],
        "dataloader_kwargs": {"batch_sampler": sampler},
        OPTIMIZER_STEPS: deque([*enumerate(layout.cell_rows_M)] * epochs),
    }


def in_order(
    name: str, layout: Layout, value_R: Sequence[float], of_pads: float
) -> dict[str, torch.Tensor]:
    """One column in the order of ``layout``, from the value of each real row and that of all
    pads."""
    # Numbers of pads are n_rows and above: all of them read the last value.
    values = torch.tensor([*value_R, of_pads], dtype=COLUMN_DTYPES[name])
    return {name: values[torch.tensor(layout.order).clamp(max=layout.n_rows)]}


def pad_column(layout: Layout) -> dict[str, torch.Tensor]:
    """Which rows are pads."""
    return in_order(IS_PADDING, layout, [False] * layout.n_rows, of_pads=True)


def loss_columns(
    layout: Layout,
    trained_tokens_R: Sequence[int],
    tokens_R: Sequence[int],
    factor_R: Sequence[float] | None = None,
    *,
    leaves_out: bool = False,
) -> dict[str, torch.Tensor]:
    """What the loss must know about each row and its mini-batch, in the order of ``layout``.

    ``tokens_R`` are those of ``loss_mask``; ``factor_R`` is None if all rows weigh the same. All
    lists are of the real rows. ``leaves_out`` says whether the update may leave rows out.
    """
    n_rows = layout.n_rows
    # Cells of 2 and 1 rows on two ranks are sent as 0 0 1 | 0 0 1.
    mini_batch_of = np.tile(
        np.repeat(np.arange(layout.n_mini_batches), layout.cell_rows_M), layout.dp_size
    )
    tokens_MDC = [
        [[trained_tokens_R[row] for row in cell if row < n_rows] for cell in ranks]
        for ranks in layout.cells
    ]
    of_mini_batch: dict[str, Sequence[int]] = {
        MINI_BATCH: range(layout.n_mini_batches),
        LOSS_ROWS: [sum(tokens_R[row] > 0 for row in rows) for rows in layout.rows_M],
        LOSS_TOKENS: [sum(map(sum, ranks)) for ranks in tokens_MDC],
        TRAINED_ROWS: [
            sum(tokens > 0 for cell in ranks for tokens in cell) for ranks in tokens_MDC
        ],
        REPORTING_RANKS: [sum(map(any, ranks)) for ranks in tokens_MDC],
    }
    if leaves_out:
        for name, each_R in zip(OF_ALL_ROWS, (tokens_R, trained_tokens_R), strict=True):
            of_mini_batch[name] = [sum(each_R[row] for row in rows) for rows in layout.rows_M]
    columns = {name: torch.tensor(of_M)[mini_batch_of] for name, of_M in of_mini_batch.items()}
    columns |= pad_column(layout)
    if factor_R is not None:
        columns |= in_order(LOSS_FACTOR, layout, factor_R, of_pads=0.0)
    return columns


def micro_batch_columns(plan: BatchPlan, call: str) -> dict[str, torch.Tensor]:
    """The number of each row's micro-batch, and its place among rows that share; nothing if verl
    cuts them."""
    layout = plan.layouts[call]
    if not layout.by_tokens:
        return {}
    # Micro-batches of 2 and 3 rows in a cell are 0 0 1 1 1.
    cells = chain.from_iterable(zip(*layout.rows_MDK, strict=True))
    numbers = [k for rows_K in cells for k, rows in enumerate(rows_K) for _ in rows]
    columns = {MICRO_BATCH: torch.tensor(numbers)}
    if plan.forest is not None:
        position_R = plan.forest.dfs_position_R.tolist()
        columns |= in_order(DFS_POSITION, layout, position_R, of_pads=-1)
    return columns
