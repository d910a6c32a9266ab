"""Rows in a TensorDict: read for what pads are made from, joined with pads, and restored without
them."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.pads.planned_call import IS_PADDING
from verl_padding.pads.source_rows import TOKEN_FIELDS, check_prompt, missing_field
from verl_padding.pads.template import Columns, same_in_all

LAYOUTS = "verl_padding_layouts"
"""Column of a padded TensorDict, the same JSON in each row: its columns before there were pads,
each with its ragged axis, 0 for a plain tensor, -1 for a strided nested one, null for what is no
tensor. A column of texts, since TransferQueue takes nothing that is held once for all rows."""
STRIDED = -1


def row_dicts(batch: TensorDict) -> list[dict[str, Any]]:
    """The fields of each row, by name.

    A PaddingDataError refuses rows without prompts or responses, or with an empty prompt.
    """
    columns = {
        name: column.unbind(0) if isinstance(column, torch.Tensor) else column.tolist()
        for name, column in _columns(batch).items()
    }
    for name in TOKEN_FIELDS:
        if name not in columns:
            raise missing_field(0, name)
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    for number, row in enumerate(rows):
        check_prompt(number, len(row["prompts"]))
    return rows


def append(batch: TensorDict, fields: Columns, n_pads: int) -> TensorDict:
    """The rows of a TensorDict, and the first ``n_pads`` of one or more pads behind them, told
    apart by a column; what it holds once for all rows stays."""
    columns = _columns(batch)
    axis_of = {name: _ragged_axis(column) for name, column in columns.items()}
    if IS_PADDING in columns:
        axis_of[IS_PADDING] = 0
    marks = torch.arange(len(batch) + n_pads, device=batch.device) >= len(batch)
    # On the device of the batch, its texts too, by tensordict's rule.
    pads = TensorDict(dict(fields), batch_size=n_pads or 1, device=batch.device)
    joined = {
        name: _column([*column.unbind(0), *pads.get(name).unbind(0)[:n_pads]], axis_of[name])
        for name, column in columns.items()
        if name != IS_PADDING
    }
    # Rows that were padded before keep what was noted then.
    joined.setdefault(LAYOUTS, same_in_all(json.dumps(axis_of), len(marks)))
    return _rows_like(batch, joined | {IS_PADDING: marks}, len(marks))


def select(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """Some rows of a TensorDict, its columns laid out as before there were pads, or as they are."""
    # Not verl's index_select_tensor_dict, which cannot take columns with two ragged axes.
    columns = {}
    axis_of = json.loads(batch[LAYOUTS][0]) if LAYOUTS in batch else {}
    for name, column in _columns(batch).items():
        value_R = column.unbind(0)
        axis = axis_of.get(name, _ragged_axis(column))
        columns[name] = _column([value_R[row] for row in rows], axis)
    return _rows_like(batch, columns, len(rows))


def restore(rows: TensorDict) -> TensorDict:
    """The real rows of a padded TensorDict, with the columns that there were before."""
    if LAYOUTS not in rows:
        return rows
    return rows.exclude(LAYOUTS, *{IS_PADDING} - json.loads(rows[LAYOUTS][0]).keys())


def _columns(batch: TensorDict) -> Columns:
    """What each row has a value of its own in."""
    # NonTensorData is one value for all rows, such as a temperature that verl hands to its workers.
    return {name: column for name, column in batch.items() if not isinstance(column, NonTensorData)}


def _rows_like(batch: TensorDict, columns: Columns, n_rows: int) -> TensorDict:
    """Other rows, with what a TensorDict holds once for all of its rows."""
    rows = TensorDict(dict(columns), batch_size=n_rows, device=batch.device)
    for name, value in batch.items():
        if name not in columns:
            tu.assign_non_tensor_data(rows, name, value.data)
    return rows


def _ragged_axis(column: torch.Tensor | NonTensorStack) -> int | None:
    if isinstance(column, NonTensorStack):
        return None
    if column.is_nested and column.layout == torch.strided:
        return STRIDED
    return getattr(column, "_ragged_idx", 0)


def _column(values: Sequence[Any], ragged_axis: int | None) -> torch.Tensor | NonTensorStack:
    """A column of rows, with the ragged axis that their shapes have; with ``ragged_axis`` if all
    have one shape."""
    if ragged_axis is None:
        return NonTensorStack(*values)
    # (3, 8) and (3, 5) differ in their second axis: the column is (rows, 3, ragged).
    shapes = zip(*(value.shape for value in values), strict=True)
    differing = [axis for axis, sizes in enumerate(shapes, 1) if len(set(sizes)) > 1]
    if len(differing) > 1 or ragged_axis == STRIDED:
        return torch.nested.as_nested_tensor(list(values), layout=torch.strided)
    axis = differing[0] if differing else ragged_axis
    if not axis:
        return torch.stack(list(values))
    # Not as_nested_tensor, which takes the first axis to be ragged where all rows have one shape.
    lengths = [0, *(value.shape[axis - 1] for value in values)]
    ends = torch.tensor(lengths, device=values[0].device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(values), dim=axis - 1), ends, jagged_dim=axis
    )
