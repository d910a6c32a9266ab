"""Columns that worker calls carry beside the rows' own fields."""

from collections.abc import Iterable

import torch
from tensordict import TensorDict

IS_PADDING = "is_padding"
"""Column (R,) in an update, and in a pass with pads: whether the row is a pad."""
BATCH_ROW = "batch_row"
"""Column (R,) in every planned call: the row's number in its layout. By it workers look up what
else the call says of the row (:class:`~verl_padding.pads.planned_call.PlannedCall`)."""
COLUMN_DTYPES = {IS_PADDING: torch.bool, BATCH_ROW: torch.int64}


def read_column(data: TensorDict, name: str) -> torch.Tensor:
    """A column (R,) of worker data of R rows."""
    return data[name].reshape(len(data))


def jagged(value_R: Iterable[torch.Tensor]) -> torch.Tensor:
    """A column of values of their own length."""
    return torch.nested.as_nested_tensor(list(value_R), layout=torch.jagged)
