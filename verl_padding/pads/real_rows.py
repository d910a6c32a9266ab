"""The real rows of anything with tags or the ``is_padding`` column, for code of your own that may get a pad."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import IS_PADDING
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import is_padding
from verl_padding.plan.counted import counted


@singledispatch
def real_rows(batch: Any) -> Any:
    """The batch without its pads, in the same order; rows that nothing marks as pads are real.

    Args:
        batch: a ``KVBatchMeta``; a list of tags (dicts); a ``TensorDict`` or a ``DataProto`` of worker data, whose
            column ``is_padding`` (R,) says which rows are pads.

    Returns: the same type, with the real rows only.

    Raises:
        PaddingDataError: worker data holds only pads.
        TypeError: the batch is anything else.
    """
    kind = type(batch).__name__
    raise TypeError(f"{kind}: real_rows takes a KVBatchMeta, a list of tags, a TensorDict or a DataProto")


@real_rows.register
def _(batch: KVBatchMeta) -> KVBatchMeta:
    return batch.select_keys([key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)])


@real_rows.register(list)
@real_rows.register(tuple)
def _(tags: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tag for tag in tags if not is_padding(tag)]


@real_rows.register
def _(batch: TensorDict) -> TensorDict:
    return tu.index_select_tensor_dict(batch, _real_places(batch.get(IS_PADDING), len(batch)))


@real_rows.register
def _(batch: DataProto) -> DataProto:
    column = batch.non_tensor_batch.get(IS_PADDING)
    if column is None and batch.batch is not None:
        column = batch.batch.get(IS_PADDING)
    return batch.select_idxs(_real_places(column, len(batch)))


def _real_places(is_pad: Any, n_rows: int) -> torch.Tensor:
    """Places of the real rows, (real rows,) int64, by a column of any kind; all rows if there is no column."""
    if is_pad is None:
        return torch.arange(n_rows)
    values = is_pad.tolist() if hasattr(is_pad, "tolist") else list(is_pad)
    places = torch.nonzero(~torch.tensor(values, dtype=torch.bool).reshape(n_rows))[:, 0]
    if n_rows and not len(places):
        raise PaddingDataError(
            f"{counted(n_rows, 'row')}, and only pads: neither of verl's classes can hold jagged fields without a row. "
            f"Look at {IS_PADDING} first if a rank may hold only pads."
        )
    return places
