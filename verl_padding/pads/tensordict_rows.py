"""Rows in a TensorDict: read for what pads are made from, joined with pads, and restored without
them."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import IS_PADDING
from verl_padding.pads.source_rows import TOKEN_FIELDS, check_prompt, missing_field
from verl_padding.pads.template import Columns, same_in_all

LAYOUTS = "verl_padding_layouts"
"""Column of a padded TensorDict, the same JSON in each row: its columns before there were pads,
each with its ragged axis, 0 for a plain tensor, -1 for a strided nested one, null for what is no
tensor; and its own value before, if it was there. A column of texts, since TransferQueue takes
nothing that is held once for all rows."""
STRIDED = -1

WRAPPERS = (NonTensorData, NonTensorStack)


def row_dicts(batch: TensorDict) -> list[dict[str, Any]]:
    """The fields of each row, by name.

    A PaddingDataError refuses rows without prompts or responses, or with an empty prompt.
    """
    columns = _columns(batch)
    for name in columns:
        if not isinstance(column := batch.get(name), torch.Tensor | NonTensorStack):
            raise PaddingDataError(
                f"field {name!r}: a {type(column).__name__} within the rows. Put its columns "
                "into the rows themselves, or give each row a dict."
            )
    for name in TOKEN_FIELDS:
        if name not in columns:
            raise missing_field(0, name)
    rows = [
        {name: _plain(value_R[row]) for name, value_R in columns.items()}
        for row in range(len(batch))
    ]
    for number, row in enumerate(rows):
        check_prompt(number, len(row["prompts"]))
    return rows


def append(batch: TensorDict, fields: Columns, n_pads: int) -> TensorDict:
    """The rows of a TensorDict, and the first ``n_pads`` pads behind them; what it holds once for
    all rows stays."""
    columns = _columns(batch)
    layouts = {name: _ragged_axis(batch.get(name)) for name in columns if name != LAYOUTS}
    # Rows that were padded before keep what that has noted.
    if before := columns.pop(LAYOUTS, None):
        layouts[LAYOUTS] = _plain(before[0])
    if IS_PADDING not in columns:
        no_pads = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
        columns[IS_PADDING] = no_pads.unbind(0)
    joined = {
        name: _column([*value_R, *fields[name].unbind(0)[:n_pads]], layouts.get(name, 0))
        for name, value_R in columns.items()
    }
    return _with_layouts(_rows_like(batch, joined, len(batch) + n_pads), json.dumps(layouts))


def _with_layouts(rows: TensorDict, layouts: str) -> TensorDict:
    return rows.set(LAYOUTS, same_in_all(layouts, len(rows)).to(rows.device))


def select(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """Some rows of a TensorDict, its columns laid out as they are."""
    # Not verl's index_select_tensor_dict, which cannot take columns with two ragged axes.
    columns = {
        name: _column([value_R[row] for row in rows], _ragged_axis(batch.get(name)))
        for name, value_R in _columns(batch).items()
    }
    return _rows_like(batch, columns, len(rows))


def _rows_like(batch: TensorDict, columns: Columns, n_rows: int) -> TensorDict:
    """Other rows, with what a TensorDict holds once for all of its rows."""
    rows = TensorDict(dict(columns), batch_size=n_rows, device=batch.device)
    for name, value in batch.items():
        if name not in columns:
            tu.assign_non_tensor_data(rows, name, value.data)
    return rows


def restore(rows: TensorDict) -> TensorDict:
    """The real rows of a padded TensorDict, laid out as before there were pads."""
    if LAYOUTS not in rows.keys():  # noqa: SIM118
        return rows
    layouts = json.loads(_plain(rows.get(LAYOUTS).unbind(0)[0]))
    before, rows = layouts.pop(LAYOUTS, None), rows.exclude(LAYOUTS)
    for name in layouts.keys() & rows.keys():
        rows[name] = _column(rows.get(name).unbind(0), layouts[name])
    rows = rows if IS_PADDING in layouts else rows.exclude(IS_PADDING)
    return rows if before is None else _with_layouts(rows, before)


def _columns(batch: TensorDict) -> dict[str, Sequence[Any]]:
    """Field -> value of each row, in tensordict's wrapper where it is no tensor."""
    # NonTensorData is one value for all rows, such as a temperature that verl hands to its workers.
    return {
        name: column.unbind(0)
        for name, column in batch.items()
        if not isinstance(column, NonTensorData)
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, WRAPPERS) else value


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
        wrapped = [each if isinstance(each, WRAPPERS) else NonTensorData(each) for each in values]
        # Those of a batch on a device are on it, too, by tensordict's rule; those of pads are not.
        device = wrapped[0].device
        return NonTensorStack(
            *(each if each.device == device else each.to(device) for each in wrapped)
        )
    # (3, 8) and (3, 5) differ in their second axis: the column is (rows, 3, ragged).
    shapes = zip(*(value.shape for value in values), strict=True)
    differing = [axis for axis, sizes in enumerate(shapes, 1) if len(set(sizes)) > 1]
    if len(differing) > 1 or ragged_axis == STRIDED:
        return torch.nested.as_nested_tensor(list(values), layout=torch.strided)
    axis = differing[0] if differing else ragged_axis
    if not axis:
        return torch.stack(list(values))
    # Not as_nested_tensor, which takes the first axis to be ragged where all rows have one shape.
    ends = torch.tensor(
        [0, *accumulate(value.shape[axis - 1] for value in values)], device=values[0].device
    )
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(values), dim=axis - 1), ends, jagged_dim=axis
    )
