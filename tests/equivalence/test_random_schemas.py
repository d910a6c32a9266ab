"""Rows of any fields, with pads between them, through the real TransferQueue: no micro-batch can
tell."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from tests.support.deep_equality import assert_equal
from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, empty_queue, put_some_fields
from tests.support.shaped_rows import FIELDS, FORMATS
from verl_padding.pads.field_kinds import FieldFormat, Kind
from verl_padding.pads.queue import read_rows
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES += [torch.complex64, torch.int32, torch.int64, torch.uint8, torch.bool]


@dataclass(frozen=True)
class Verdict:
    """A value of a user's own type."""

    passed: bool


CONSTANTS = [
    *(torch.ones(()).to(dtype) for dtype in DTYPES),
    *(None, True, 3, 2.5, "text", b"bytes", (1, "two"), {1, 2}, range(3), [], {}),
    *(Verdict(True), Decimal("0.1"), datetime(2026, 1, 1, tzinfo=UTC)),
    [{"role": "user", "content": [b"bytes", None]}],
    *(np.bool_(True), np.int64(3), np.float32(0.5), np.float64(0.5)),
    *(np.str_("text"), np.bytes_(b"bytes"), np.datetime64("2026-01-01")),
    {"acc": np.float64(1.0), "nested": {"list": [1, None], "array": np.arange(3)}},
    *(np.ones((2, 3), dtype=np.float16), [1.5, 2.5]),
]


def same(value, _prompt, _response):
    return value


TRIED = {
    each: FIELDS[each]
    for each in ("array", "empty", "list", "one number", "one shape", "routes", "teacher", "values")
}
TRIED["transposed"] = "transposed", lambda p, r: torch.ones(5, p + r).T
TRIED |= {repr(each): (f"own_{n}", partial(same, each)) for n, each in enumerate(CONSTANTS)}
"""What is tried -> name of a field that rows of text lack, and its value in a row of a prompt and a
response."""
KINDS = FORMATS | {"transposed": FieldFormat(Kind.SEQUENCE)}
SOME = st.sets(st.sampled_from(sorted(TRIED)), max_size=6)
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=7)


@settings(
    max_examples=5,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(tried=SOME.filter(bool), in_some_rows=SOME, lengths=LENGTHS, dp_size=st.integers(2, 3))
@example(tried=set(TRIED), in_some_rows=set(), lengths=[(5, 3), (5, 4), (2, 2)], dp_size=2)
@example(tried=set(TRIED), in_some_rows=set(TRIED), lengths=[(5, 3), (5, 4), (2, 2)], dp_size=3)
def test_pads_between_rows_change_no_field_of_any_micro_batch(
    tried, in_some_rows, lengths, dp_size
):
    rows = [
        {name: make(*length) for name, make in map(TRIED.get, sorted(of_row))}
        for length, of_row in zip(lengths, cycle([tried, tried - in_some_rows]), strict=False)
    ]
    batch = put_some_fields(lengths, rows)
    try:
        template = PadTemplate(eos_token_id=3, length=4, schema=Schema(KINDS))
        plan = plan_for(batch, dp_size=dp_size)
        assume(plan.n_pads)
        event(f"{min(plan.n_pads, 2)} pads or more")
        names = dict(zip(batch.keys, map(set, rows), strict=True))
        alone = {key: read_rows([key], PARTITION)[0] for key in batch.keys}
        padded = upsample(batch, plan, template)
        order = padded.worker_batch("actor", batch).keys
        assert any(key not in names for key in order), "no pad was met"
        for size in (1, 2, 3, 8):
            for start in range(0, len(order), size):
                check_micro_batch(order[start : start + size], names, alone)
        strip(padded.pads)
    finally:
        empty_queue()


def check_micro_batch(keys, names, alone):
    """Of rows with fields of these names, which are in the queue as they are alone."""
    data, every = tq.kv_batch_get(keys=keys, partition_id=PARTITION), set.union(*names.values())
    real = [key for key in keys if key in names]
    found = every & set(data.keys())
    want = set.intersection(*[names[key] for key in real]) if real else every
    assert found == want, "a pad made a field appear or vanish"
    without_pads = tq.kv_batch_get(keys=real, partition_id=PARTITION) if real else data
    for name in found:
        assert type(data.get(name)) is type(without_pads.get(name)), (
            "a pad made another kind of column"
        )
    for key, row in zip(keys, data.unbind(0), strict=True):
        for name in found if key in names else ():
            assert_equal(row[name], alone[key][name], name)
