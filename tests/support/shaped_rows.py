"""Rows with fields of every shape that docs/custom_code.md names, in a TensorDict."""

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from tests.support.deep_equality import assert_equal
from tests.support.rows_in_queue import row_fields
from verl_padding.pads.field_kinds import FieldFormat, Kind

FIELDS = {
    "three axes": ("position_ids", lambda p, r: torch.arange(p + r).expand(3, -1).clone()),
    "four axes": ("position_ids", lambda p, r: torch.arange(p + r).expand(4, -1).clone()),
    "images": (
        "multi_modal_inputs",
        lambda p, r: {"pixel_values": torch.rand(4 * p, 24)} if p % 2 else {},
    ),
    "routes": (
        "routed_experts",
        lambda p, r: torch.rand(p + r, 3, 8).topk(2).indices.to(torch.int16),
    ),
    "teacher": ("teacher_logprobs", lambda p, r: torch.rand(p + r, 5, dtype=torch.float64)),
    "values": ("values", lambda p, r: torch.rand(r, dtype=torch.bfloat16)),
    "one number": ("reward", lambda p, r: torch.tensor(1.0)),
    "one shape": ("dummy_tensor", lambda p, r: torch.zeros(1, dtype=torch.uint8)),
    "array": ("scores", lambda p, r: np.ones(p, dtype=np.float32)),
    "list": ("turns", lambda p, r: [1.5] * r),
    "often none": ("notes", lambda p, r: torch.ones(r) if p % 2 else None),
    "empty": ("features", lambda p, r: torch.ones(p + r, 0)),
    "two axes": ("grid", lambda p, r: torch.ones(p, r)),
    "odd length": ("odd", lambda p, r: torch.ones(p * r)),
    "number of a session": ("session_id", lambda p, r: torch.tensor(p)),
    "no pad": ("is_padding", lambda p, r: torch.tensor(False)),
    "no pad, said otherwise": ("is_padding", lambda p, r: False),
}
"""What is tried -> name of a field, and its value in a row of a prompt and a response."""
FORMATS = {"grid": FieldFormat(Kind.OBJECT), "features": FieldFormat(Kind.SEQUENCE)}
FORMATS |= {"notes": FieldFormat(Kind.RESPONSE), "odd": FieldFormat(Kind.OBJECT)}
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7)
SHAPES = st.sets(st.sampled_from(sorted(FIELDS)))


def rows_of(lengths, tried=()):
    """Rows of (prompt, response) lengths, with the fields of some keys of :data:`FIELDS` beside
    those of text."""
    extra = [FIELDS[each] for each in sorted(tried)]
    texts = [row_fields(*length, f"prompt {row}") for row, length in enumerate(lengths)]
    return [
        row | {name: make(*length) for name, make in extra}
        for row, length in zip(texts, lengths, strict=True)
    ]


def in_tensordict(rows, *, jagged=True):
    """Rows as TransferQueue hands them out; or as verl joins them, with fields of one shape in
    plain tensors."""
    columns = {name: _column([row[name] for row in rows], jagged) for name in rows[0]}
    return TensorDict(columns, batch_size=len(rows))


def _column(values_R, jagged):
    if not all(isinstance(value, torch.Tensor) for value in values_R):
        return NonTensorStack(*values_R)
    if values_R[0].dim() == 0 or (not jagged and len({value.shape for value in values_R}) == 1):
        return torch.stack(list(values_R))
    try:
        return torch.nested.as_nested_tensor(list(values_R), layout=torch.jagged)
    except RuntimeError:  # more than one ragged axis
        return torch.nested.as_nested_tensor(list(values_R), layout=torch.strided)


def assert_same_rows(got, want):
    """The same columns, of the same kind and layout, with the same values."""
    assert set(got.keys()) == set(want.keys())
    assert got.batch_size == want.batch_size
    for name in want.keys():  # noqa: SIM118
        column, wanted = got.get(name), want.get(name)
        assert layout(column) == layout(wanted), name
        for row, (value, other) in enumerate(zip(values(column), values(wanted), strict=True)):
            assert_equal(value, other, f"{name} of row {row}")


def layout(column):
    if not isinstance(column, torch.Tensor):
        return (type(column),)
    return column.is_nested, column.layout, column.dim(), getattr(column, "_ragged_idx", None)


def values(column):
    """The value of each row."""
    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()
