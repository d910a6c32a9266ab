"""Rows of any fields, with pads between them, through the real TransferQueue: no micro-batch can
tell."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from tests.support.deep_equality import assert_equal
from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, empty_queue, put_some_fields
from verl_padding.pads.columns import COLUMN_DTYPES
from verl_padding.pads.field_kinds import FieldFormat, Kind
from verl_padding.pads.queue import read_rows
from verl_padding.pads.template import PadTemplate, Schema, empty_value
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

PAD_LENGTH = 4
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES += [torch.complex64, torch.int32, torch.int64, torch.uint8, torch.bool]


@dataclass(frozen=True)
class Verdict:
    """A value of a user's own type."""

    passed: bool


OBJECTS = [
    *(None, True, 3, 2.5, "text", b"bytes", (1, "two"), {1, 2}, range(3), [], {}),
    *(Verdict(True), Decimal("0.1"), datetime(2026, 1, 1, tzinfo=UTC)),
    [{"role": "user", "content": [b"bytes", None]}],
    *(np.bool_(True), np.int64(3), np.float32(0.5), np.float64(0.5)),
    *(np.str_("text"), np.bytes_(b"bytes"), np.datetime64("2026-01-01")),
    {"acc": np.float64(1.0), "nested": {"list": [1, None], "array": np.arange(3)}},
    *(np.ones((2, 3), dtype=np.float16), [1.5, 2.5]),
]


@dataclass(frozen=True)
class Field:
    kind: Kind
    form: str
    dtype: torch.dtype = torch.float32
    trailing: tuple[int, ...] = ()
    of_all_rows: bool = True
    object_of: int = 0

    def value(self, prompt, response):
        if self.kind is Kind.OBJECT:
            return OBJECTS[self.object_of]
        lengths = {
            Kind.PROMPT: prompt,
            Kind.RESPONSE: response,
            Kind.SEQUENCE: prompt + response,
        }
        shape = self.trailing if self.kind is Kind.ROW else (lengths[self.kind], *self.trailing)
        value = torch.ones(shape).to(self.dtype)
        if self.form == "transposed":
            return (
                torch.ones(shape[::-1]).to(self.dtype).permute(tuple(reversed(range(len(shape)))))
            )
        return value


@st.composite
def fields_of_rows(draw):
    kind = draw(
        st.sampled_from(
            [
                Kind.PROMPT,
                Kind.RESPONSE,
                Kind.SEQUENCE,
                Kind.ROW,
                Kind.OBJECT,
            ]
        )
    )
    if kind is Kind.OBJECT:
        object_of = draw(st.sampled_from(range(len(OBJECTS))))
        return Field(kind, "object", of_all_rows=draw(st.booleans()), object_of=object_of)
    form = draw(st.sampled_from(["tensor", "transposed"]))
    trailing = draw(st.sampled_from([(), (1,), (5,), (2, 3), (0,)]))
    return Field(kind, form, draw(st.sampled_from(DTYPES)), trailing, draw(st.booleans()))


SCHEMAS = st.lists(fields_of_rows(), min_size=1, max_size=6)
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=7)
SCALARS = [Field(Kind.ROW, "tensor", dtype) for dtype in DTYPES]
ALL_OBJECTS = [Field(Kind.OBJECT, "object", object_of=number) for number in range(len(OBJECTS))]


def zeros_of(field):
    """What a pad has."""
    return torch.zeros_like(field.value(PAD_LENGTH - 1, 1))


@settings(
    max_examples=5,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(schema=SCHEMAS, lengths=LENGTHS, dp_size=st.integers(2, 3))
@example(schema=SCALARS, lengths=[(5, 3), (5, 4), (2, 2)], dp_size=2)
@example(schema=ALL_OBJECTS, lengths=[(5, 3), (5, 4), (2, 2)], dp_size=2)
@example(schema=SCALARS + ALL_OBJECTS, lengths=[(5, 3), (5, 4), (2, 2)], dp_size=3)
def test_pads_between_rows_change_no_field_of_any_micro_batch(schema, lengths, dp_size):
    names = {f"custom_{number}": field for number, field in enumerate(schema)}
    in_some = {name for name, field in names.items() if field.of_all_rows}
    having = [set(names) if row % 2 == 0 else in_some for row in range(len(lengths))]
    rows = [
        {name: names[name].value(*length) for name in sorted(having[row])}
        for row, length in enumerate(lengths)
    ]
    batch = put_some_fields(lengths, rows)
    declared = {
        name: FieldFormat(field.kind)
        for name, field in names.items()
        if field.kind is not Kind.OBJECT
    }
    try:
        template = PadTemplate(eos_token_id=3, length=PAD_LENGTH, schema=Schema(declared))
        plan = plan_for(batch, dp_size=dp_size)
        assume(plan.n_pads)
        event(f"{min(plan.n_pads, 2)} pads or more")
        custom = {key: having[row] for row, key in enumerate(batch.keys)}
        alone = {key: read_rows([key], PARTITION)[0] for key in batch.keys}
        padded = upsample(batch, plan, template)
        order = padded.update_rows("actor", batch).keys
        assert any(key not in custom for key in order), "no pad was met"
        for size in (1, 2, 3, 8):
            for start in range(0, len(order), size):
                check_micro_batch(order[start : start + size], custom, names, alone)
        strip(padded.pads)
    finally:
        empty_queue()


def check_micro_batch(keys, custom, names, alone):
    data = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
    found = {name for name in set(data.keys()) - COLUMN_DTYPES.keys() if name.startswith("custom_")}
    real = [key for key in keys if key in custom]
    want = set.intersection(*[custom[key] for key in real]) if real else set.union(*custom.values())
    assert found == want, "a pad made a field appear or vanish"
    without_pads = tq.kv_batch_get(keys=real, partition_id=PARTITION) if real else data
    for name in found:
        assert type(data.get(name)) is type(without_pads.get(name)), (
            "a pad made another kind of column"
        )
    # What TransferQueue makes of an object: a Decimal comes back as text, a data class as a dict.
    objects = {
        name: empty_value(next(row[name] for row in alone.values() if name in row))
        for name in found
        if names[name].kind is Kind.OBJECT
    }
    for key, row in zip(keys, data.unbind(0), strict=True):
        for name in found:
            if key in custom:
                want = alone[key][name]
            else:
                want = objects[name] if name in objects else zeros_of(names[name])
            assert_equal(row[name], want, name)
