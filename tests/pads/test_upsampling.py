"""The verbs for a trainer of one's own, in the real TransferQueue."""

import doctest
from copy import deepcopy
from functools import partial

import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack
from transfer_queue import KVBatchMeta

from tests.support.deep_equality import assert_equal
from tests.support.rows_in_queue import (
    PARTITION,
    empty_queue,
    put_rows,
    put_some_fields,
    queue_content,
)
from tests.support.shaped_rows import FIELDS, FORMATS, SHAPES, assert_same_rows, rows_of
from verl_padding import real_rows, strip, upsample
from verl_padding.errors import PaddingDataError
from verl_padding.pads import upsampling
from verl_padding.pads.planned_call import IS_PADDING
from verl_padding.pads.queue import read_fields, read_rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

NOT_IN_A_QUEUE = {"no pad, said otherwise", "two axes", "odd length"}
IN_A_QUEUE = sorted(set(FIELDS) - NOT_IN_A_QUEUE)


@pytest.mark.parametrize("verb", [upsample, strip, real_rows])
def test_the_example_of_each_verb_runs_as_it_is_printed(verb):
    found = doctest.DocTestFinder(recurse=False).find(
        verb, globs=vars(upsampling) | {"batch": put_rows([(5, 3)] * 5)}
    )
    results = [doctest.DocTestRunner().run(example) for example in found]
    assert [(result.failed, result.attempted > 0) for result in results] == [(0, True)]


@pytest.fixture
def five_rows():
    """A function that puts five rows, with other fields beside those of text."""
    return lambda *tried: put_some_fields(FIVE, rows_of(FIVE, tried))


FIVE = [(5, 3), (4, 2), (7, 1), (3, 3), (2, 2)]


def worker_data_of(batch):
    """What a worker gets that is called with these rows."""
    return read_fields(batch.keys, batch.partition_id, batch.fields)


@settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    tried=SHAPES.map(lambda shapes: shapes - NOT_IN_A_QUEUE),
    selected=st.booleans(),
)
@example(tried=set(IN_A_QUEUE) - {"four axes"}, selected=False)
@example(tried=set(IN_A_QUEUE) - {"three axes", "no pad"}, selected=True)
def test_strip_leaves_rows_in_the_queue_as_they_were(tried, selected):
    rows = rows_of(FIVE, tried - {"no pad"})
    for row in rows[::2]:
        row |= {"is_padding": torch.tensor(False)} if "no pad" in tried else {}
    batch = put_some_fields(FIVE, rows)
    batch.extra_info["temperature"] = 0.5
    if selected:
        batch.fields = ["prompts", "input_ids", "is_padding"]
    was = deepcopy(batch)
    before = read_rows_one_by_one(batch)
    padded = upsample(batch, 8, fields=FORMATS)
    assert batch == was
    data = worker_data_of(padded)
    assert data["is_padding"].tolist() == [False] * 5 + [True] * 3
    assert_same_rows(real_rows(data).select("input_ids"), worker_data_of(batch).select("input_ids"))
    for _ in range(2):
        assert strip(padded) == was
        for got, want in zip(read_rows_one_by_one(batch), before, strict=True):
            assert_equal(got, want | {"is_padding": torch.tensor(False)})
    empty_queue()


def read_rows_one_by_one(batch):
    """Each row with all of its own fields."""
    return [read_rows([key], PARTITION)[0] for key in batch.keys]


def test_a_tensordict_gets_the_pads_that_the_queue_gets(five_rows):
    batch = five_rows(*IN_A_QUEUE)
    held = worker_data_of(batch)
    said = {"eos_token_id": 7, "length": 4, "fields": FORMATS}
    in_queue = worker_data_of(upsample(batch, 8, **said))
    assert_same_rows(
        upsample(held, 8, **said).exclude("uid", "verl_padding_layouts"), in_queue.exclude("uid")
    )


def test_strip_may_come_after_the_rows_are_gone(five_rows):
    padded = upsample(five_rows(), 8)
    tq.kv_clear(keys=padded.keys[:2], partition_id=PARTITION)
    assert strip(padded).keys == padded.keys[:5]
    tq.kv_clear(keys=padded.keys[2:5], partition_id=PARTITION)
    assert strip(padded).keys == padded.keys[:5]
    assert not queue_content()


IS_PAD = [False, True, False, True, True, False]
REAL = [row for row, is_pad in enumerate(IS_PAD) if not is_pad]
TAGS = [
    {"seq_len": row} | ({"is_padding": True} if is_pad else {}) for row, is_pad in enumerate(IS_PAD)
]


def worker_data(is_padding):
    rows = [torch.arange(1 + row) for row in range(len(IS_PAD))]
    fields = {
        "row": torch.arange(len(IS_PAD)),
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "name": NonTensorStack(*[f"row {row}" for row in range(len(IS_PAD))]),
        "is_padding": is_padding,
    }
    return TensorDict(fields, batch_size=len(IS_PAD))


def test_a_batch_of_keys_keeps_its_real_ones_with_their_tags():
    batch = KVBatchMeta(
        keys=[f"p_{row}_0" for row in range(6)], tags=TAGS, partition_id="train", fields=["ids"]
    )
    kept = real_rows(batch)
    assert kept.keys == [f"p_{row}_0" for row in REAL]
    assert [tag["seq_len"] for tag in kept.tags] == REAL
    assert (kept.partition_id, kept.fields) == ("train", ["ids"])


def test_worker_data_of_pads_alone_is_told_by_name():
    with pytest.raises(PaddingDataError, match="6 rows, all of them pads"):
        real_rows(worker_data(torch.ones(6, dtype=torch.bool)))


@pytest.mark.parametrize(
    "given", [{"multiple": 2.5}, {"multiple": True}, {"eos_token_id": None}, {"length": 2.5}]
)
def test_an_argument_of_another_kind_is_refused_by_its_name(given):
    batch = put_rows([(5, 3), (7, 2)])
    with pytest.raises(PaddingDataError, match=next(iter(given))):
        upsample(batch, **{"multiple": 4} | given)


@pytest.mark.parametrize("mark", [[float("nan")], [2.0], [0.0, 1.0]])
def test_a_mark_that_is_neither_true_nor_false_is_refused(mark):
    rows = TensorDict({IS_PADDING: torch.tensor([[0.0] * len(mark), mark])}, batch_size=2)
    with pytest.raises(PaddingDataError, match=f"'{IS_PADDING}'"):
        real_rows(rows)


def test_the_verbs_name_what_they_take():
    for verb in (strip, real_rows, partial(upsample, multiple=2)):
        with pytest.raises(TypeError, match="KVBatchMeta"):
            verb({"input_ids": torch.zeros(2, 3)})
    with pytest.raises(TypeError, match="densify"):
        real_rows(lazy_stack([TensorDict({"prompts": torch.ones(n)}) for n in (1, 2)]))
