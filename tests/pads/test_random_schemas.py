"""Rows of any fields, with pads between them, through the real TransferQueue: no micro-batch can tell."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pads.rows_in_queue import PARTITION, put_some_fields, queue_content
from tests.pads.test_padded_batch import plan_for
from verl_padding.pads.columns import OWN_COLUMNS
from verl_padding.pads.padded_batch import strip, upsample
from verl_padding.pads.roles import FieldRole, Role
from verl_padding.pads.schema import Schema
from verl_padding.pads.template import PadTemplate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

PAD_LENGTH = 4
LENGTHS_OF_A_PAD = {Role.PROMPT: 3, Role.RESPONSE: 1, Role.SEQUENCE: 4}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool]


@dataclass(frozen=True)
class Field:
    role: Role
    kind: str
    dtype: torch.dtype
    trailing: tuple[int, ...]
    of_all_rows: bool

    def value(self, prompt, response):
        lengths = {Role.PROMPT: prompt, Role.RESPONSE: response, Role.SEQUENCE: prompt + response}
        shape = self.trailing if self.role is Role.ROW else (lengths[self.role], *self.trailing)
        value = torch.ones(shape).to(self.dtype)
        if self.kind == "array":
            return value.float().numpy()
        return [1.0] * shape[0] if self.kind == "list" else value


@st.composite
def fields_of_rows(draw):
    role = draw(st.sampled_from([Role.PROMPT, Role.RESPONSE, Role.SEQUENCE, Role.ROW]))
    kind = draw(st.sampled_from(["tensor", "array"] + ["list"] * (role is not Role.ROW)))
    trailing = () if kind == "list" else draw(st.sampled_from([(), (1,), (5,), (2, 3)]))
    return Field(role, kind, draw(st.sampled_from(DTYPES)), trailing, draw(st.booleans()))


SCHEMAS = st.lists(fields_of_rows(), min_size=1, max_size=4)
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=7)


def kind_of(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype
    return type(value), type(value[0]) if value else None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, lengths=LENGTHS)
def test_pads_between_rows_change_no_field_of_any_micro_batch(schema, lengths):
    names = {f"custom_{number}": field for number, field in enumerate(schema)}
    having = [
        {name for name, field in names.items() if field.of_all_rows or row % 2 == 0} for row in range(len(lengths))
    ]
    rows = [{name: names[name].value(*length) for name in sorted(having[row])} for row, length in enumerate(lengths)]
    batch = put_some_fields(lengths, rows)
    declared = {name: FieldRole(field.role) for name, field in names.items()}
    try:
        template = PadTemplate(eos_token_id=3, length=PAD_LENGTH, schema=Schema(declared))
        plan = plan_for(batch, dp_size=3)
        padded = upsample(batch, plan, template)
        order = padded.update_call("actor", batch).keys
        custom = {key: having[row] for row, key in enumerate(batch.keys)}
        assert any(key not in custom for key in order), "no pad was met"
        for size in (1, 2, 3, 8):
            for start in range(0, len(order), size):
                check_micro_batch(order[start : start + size], custom, names)
        strip(padded)
    finally:
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


def check_micro_batch(keys, custom, names):
    data = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
    found = {name for name in data.keys() if name not in OWN_COLUMNS and name.startswith("custom_")}  # noqa: SIM118
    real = [key for key in keys if key in custom]
    want = set.intersection(*[custom[key] for key in real]) if real else set.union(*custom.values())
    assert found == want, "a pad made a field appear or vanish"
    for key, row in zip(keys, data.unbind(0), strict=True):
        prompt, response = len(row["prompts"]), len(row["responses"])
        for name in found:
            field, value = names[name], row[name]
            expected = field.value(prompt, response)
            assert kind_of(value) == kind_of(expected), name
            if key in custom:
                assert np.array_equal(np.asarray(as_list(value)), np.asarray(as_list(expected)))
            elif field.role is not Role.ROW:
                assert len(value) == LENGTHS_OF_A_PAD[field.role]
                assert not np.any(as_list(value))


def as_list(value):
    return value.float().tolist() if isinstance(value, torch.Tensor) else np.asarray(value).tolist()
