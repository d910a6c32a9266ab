"""What workers must know of a planned call: columns beside the rows' own fields, and one object, in
which they look rows up by their numbers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self

import torch
from tensordict import TensorDict

from verl_padding.plan import Layout
from verl_padding.plan.layout import RowNumbers

IS_PADDING = "is_padding"
"""Column (R,) in an update, and in a pass with pads: whether the row is a pad."""
BATCH_ROW = "batch_row"
"""Column (R,) in every planned call: the row's number in its layout. By it workers look up what
else the call says of the row (:class:`PlannedCall`)."""
COLUMN_DTYPES = {IS_PADDING: torch.bool, BATCH_ROW: torch.int64}
CALL = "planned_call"
"""Key of a call's ``extra_info``, and so of its rows: the :class:`PlannedCall`."""
MINI_BATCH = "mini_batch"
"""Key of the rows of an optimizer step: its :class:`MiniBatch`."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What an optimizer step must know of its mini-batch, over all ranks; ``plan/mini_batches.py``
    cuts them."""

    local_batches: tuple[RowNumbers, ...]
    """Row numbers of each rank."""
    rows_with_loss: int | None
    """Rows that have a token with a loss, by their ``loss_mask``, dropped or not; None where
    losses divide by a configured number."""
    trained_tokens: int
    """Those that ``response_mask`` keeps, of rows that are computed."""
    trained_rows: int
    """Rows that have some of these tokens."""
    reporting_ranks: int
    """Data-parallel ranks that hold some of them."""
    all_loss_tokens: int | None = None
    """Of an update that may drop rows: tokens with a loss of all rows, by their ``loss_mask``,
    which verl divides by."""


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """What workers must know of the rows of a call."""

    layout: Layout
    may_branch: bool | None = None
    """Whether rows share tokens before they branch, or only full prefixes; None where they
    share nothing."""
    position_R: Sequence[int] = ()
    """Where they share: place of each real row among those of the batch, so that a row shares most
    with the one before it."""
    factor_R: Sequence[float] | None = None
    """What the gradient of each real row's outputs is multiplied by
    (:mod:`~verl_padding.pads.loss_weighting`); None where all weigh the same."""
    takes_own_log_probs: bool = False
    """Whether an update takes its own log-probs for the old policy's."""
    mini_batches: deque[MiniBatch] = field(default_factory=deque)
    """Those that are to come, in every epoch: one an optimizer step."""

    def __deepcopy__(self, memo: Any) -> Self:
        # KVBatchMeta copies what it says with each part of a batch, one a rank, and workers copy it
        # again. Nothing but the queue is ever changed.
        return replace(self, mini_batches=self.mini_batches.copy())


def read_column(data: TensorDict, name: str) -> torch.Tensor:
    """A column (R,) of worker data of R rows."""
    return data[name].reshape(len(data))


def planned_call(data: TensorDict) -> PlannedCall | None:
    """What a call says of its rows; None of a call that was not planned."""
    return data[CALL] if CALL in data else None  # noqa: SIM401  (get wraps what is no tensor)


def mini_batches(
    layout: Layout,
    trained_tokens_R: Sequence[int],
    loss_tokens_R: Sequence[int],
    *,
    divides_by_rows: bool = True,
    drops_rows: bool = False,
) -> list[MiniBatch]:
    """The mini-batches of an update, from its real rows.

    Args:
        trained_tokens_R, loss_tokens_R: tokens of each that ``response_mask`` and ``loss_mask``
            keep.
        divides_by_rows: whether losses that weigh rows divide by those of the mini-batch.
        drops_rows: whether the update may drop rows.
    """
    steps = []
    for local_batches, rows in zip(layout.local_batches, layout.rows_M, strict=True):
        loss_tokens = [loss_tokens_R[row] for row in rows]
        trained_DR = [
            [trained_tokens_R[row] for row in local_batch if row < layout.n_rows]
            for local_batch in local_batches
        ]
        steps.append(
            MiniBatch(
                local_batches=local_batches,
                rows_with_loss=sum(map(bool, loss_tokens)) if divides_by_rows else None,
                trained_tokens=sum(map(sum, trained_DR)),
                trained_rows=sum(map(bool, chain(*trained_DR))),
                reporting_ranks=sum(map(any, trained_DR)),
                all_loss_tokens=sum(loss_tokens) if drops_rows else None,
            )
        )
    return steps


def cut_into(layout: Layout) -> dict[str, Any]:
    """What makes verl's workers cut the rows of a rank into consecutive mini-batches.

    Two rows and three are ``{"dataloader_kwargs": {"batch_sampler": [range(0, 2), range(2, 5)]},
    ..}``. A DataLoader takes that only beside a batch size of 1, and verl's is the rows over
    ``num_mini_batch``.
    """
    ends = [0, *accumulate(layout.local_batch_rows_M)]
    sampler = [range(begin, end) for begin, end in pairwise(ends)]
    return {"num_mini_batch": ends[-1], "dataloader_kwargs": {"batch_sampler": sampler}}
