"""Pads in a TensorDict of rows: no queue is needed."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.deep_equality import assert_equal
from tests.support.shaped_rows import (
    FIELDS,
    FORMATS,
    LENGTHS,
    SHAPES,
    assert_same_rows,
    in_tensordict,
    rows_of,
    values,
)
from verl_padding import real_rows, strip, upsample

FIVE = [(5, 3), (4, 2), (6, 1), (3, 3), (2, 2)]
SAID_OTHERWISE = "no pad, said otherwise"
ALL_SHAPES = set(FIELDS) - {"four axes", SAID_OTHERWISE}


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    tried=SHAPES.map(lambda tried: tried - {SAID_OTHERWISE}),
    multiple=st.integers(1, 9),
    jagged=st.booleans(),
    length=st.integers(2, 5),
)
@example(lengths=FIVE, tried=ALL_SHAPES, multiple=8, jagged=False, length=2)
@example(lengths=[(4, 2)] * 3, tried=ALL_SHAPES, multiple=4, jagged=False, length=6)
@example(lengths=[(4, 2)] * 3, tried={"four axes"}, multiple=4, jagged=True, length=2)
@example(
    lengths=[(2, 1), (2, 2), (4, 1), (6, 1), (1, 1)],
    tried={"often none"},
    multiple=3,
    jagged=False,
    length=2,
)
def test_strip_gives_back_what_upsample_got(lengths, tried, multiple, jagged, length):
    if not any(prompt % 2 for prompt, _ in lengths):
        tried = tried - {"often none"}  # a declared kind wants a value
    rows = rows_of(lengths, tried)
    batch, before = in_tensordict(rows, jagged=jagged), in_tensordict(rows, jagged=jagged)
    padded = upsample(batch, multiple, eos_token_id=7, length=length, fields=FORMATS)
    assert_same_rows(batch, before)
    assert len(padded) % multiple == 0 <= len(padded) - len(batch) < multiple
    for name, column in padded.items():
        if name in rows[0]:
            real = values(column)[: len(batch)] if not isinstance(column, NonTensorData) else []
            for value, row in zip(real, rows, strict=bool(real)):
                assert_equal(value, row[name], name)
    assert len(real_rows(padded)) == len(batch)
    for _ in range(2):
        assert_same_rows(strip(padded), before)
    assert_same_rows(strip(strip(padded)), before)


def test_chunks_and_later_columns_are_stripped_as_well():
    batch = in_tensordict(rows_of([(5, 3), (5, 2), (5, 3)]), jagged=False)
    padded = upsample(batch, 4)
    padded["advantages"] = torch.arange(4.0)
    first, second = (strip(chunk) for chunk in tu.chunk_tensordict(padded, 2))
    assert second["advantages"].tolist() == [2.0]
    assert_same_rows(tu.concat_tensordict([first, second]).exclude("advantages"), batch)


def test_what_holds_for_all_rows_stays_as_it_is():
    batch = in_tensordict(rows_of(FIVE))
    tu.assign_non_tensor(batch, temperature=0.7, sizes={"mini": 4})
    for rows in (upsample(batch, 8), strip(upsample(batch, 8))):
        assert tu.get(rows, "temperature") == 0.7
        assert tu.get(rows, "sizes") == {"mini": 4}


def test_pads_are_told_from_rows_that_are_marked_by_pythons_truth():
    batch = without().set("is_padding", NonTensorStack(*[False] * 5))
    padded = upsample(batch, 8)
    assert padded["is_padding"].tolist() == [False] * 5 + [True] * 3
    assert strip(padded)["is_padding"].tolist() == [False] * 5


def without(*names):
    return in_tensordict(rows_of(FIVE)).exclude(*names)


REFUSED = {
    "no prompt token": (lambda: without(), {"length": 1}, "^length=1: "),
    "multiple": (lambda: without(), {"multiple": 0}, "^multiple=0:"),
    "masks of other lengths": (
        lambda: without().set("response_mask", torch.ones(5, 1, dtype=torch.int64)),
        {},
        "^field 'response_mask'",
    ),
    "no prompts": (lambda: without("prompts"), {}, "^row 0: has no field 'prompts'"),
    "no responses": (lambda: without("responses"), {}, "^row 0: has no field 'responses'"),
    "empty prompt": (
        lambda: in_tensordict(rows_of([(3, 1), (0, 2)])),
        {},
        "^row 1: its prompt has no",
    ),
    "no row": (lambda: TensorDict({}, batch_size=0), {}, "^a batch without a row"),
    "pads": (lambda: upsample(without(), 8), {}, "^row 5: tagged is_padding"),
    "no kind": (
        lambda: in_tensordict(rows_of(FIVE, ["odd length"])),
        {},
        r"^field 'odd'.* fields=\{'odd': FieldFormat",
    ),
}


@pytest.mark.parametrize("multiple", [5, 8])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_padded_is_one_clear_error(case, multiple):
    make, said, message = REFUSED[case]
    batch = make()
    before = batch.clone()
    with pytest.raises(ValueError, match=message):
        upsample(batch, **{"multiple": multiple} | said)
    assert_same_rows(batch, before)


def test_pads_are_on_the_device_of_a_batch_with_texts():
    batch = without().to("cpu")
    assert batch.device == torch.device("cpu")
    padded = upsample(batch, 8)
    assert padded.device == batch.device
    assert {padded.get(name).device for name in padded.keys()} == {batch.device}  # noqa: SIM118
    assert_same_rows(strip(padded), batch)


def test_rows_that_need_no_pads_are_marked_as_well():
    batch = without()
    padded = upsample(batch, 5)
    assert padded["is_padding"].tolist() == [False] * 5
    assert_same_rows(strip(padded), batch)


@settings(max_examples=20)
@given(lengths=LENGTHS, tried=SHAPES, multiples=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@example(lengths=FIVE, tried=set(), multiples=(4, 8))
def test_rows_that_were_padded_before_keep_what_was_noted(lengths, tried, multiples):
    tried = tried - {"often none", SAID_OTHERWISE}
    batch = in_tensordict(rows_of(lengths, tried), jagged=False)
    real = real_rows(upsample(batch, multiples[0], fields=FORMATS))
    assert_same_rows(strip(upsample(real, multiples[1], fields=FORMATS)), batch)
    assert_same_rows(strip(real), batch)


def test_a_strided_column_stays_one():
    batch = without()
    batch["grid"] = torch.nested.as_nested_tensor(
        [torch.ones(2, 3 + row % 2) for row in range(5)], layout=torch.strided
    )
    padded = upsample(batch, 8, fields=FORMATS)
    assert padded["grid"].layout == real_rows(padded)["grid"].layout == torch.strided
    assert_same_rows(strip(padded), batch)
