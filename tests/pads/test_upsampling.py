"""The verbs for a trainer of one's own, in the real TransferQueue."""

import doctest

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto

from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from verl_padding import real_rows, strip, upsample
from verl_padding.errors import PaddingDataError
from verl_padding.pads import upsampling
from verl_padding.pads.queue import read_rows
from verl_padding.pads.roles import FieldRole, Role

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, multiple=st.integers(1, 9))
def test_a_batch_is_upsampled_to_the_next_multiple_and_stripped_to_what_it_was(lengths, multiple):
    batch = put_rows(lengths)
    before = queue_content()
    padded = upsample(batch, multiple, eos_token_id=3, length=4)
    assert len(padded) == next(n for n in range(len(batch), len(batch) + multiple) if n % multiple == 0)
    assert padded.keys[: len(batch)] == batch.keys
    assert real_rows(padded).keys == batch.keys
    assert queue_content().keys() == set(padded.keys)
    names = set(read_rows(batch.keys[:1], PARTITION)[0])
    for pad in read_rows(padded.keys, PARTITION)[len(batch) :]:
        assert set(pad) == names
        assert pad["input_ids"].tolist() == [3] * 4
        assert not pad["response_mask"].any()
    for _ in range(2):
        back = strip(padded)
        assert (back.keys, back.tags) == (batch.keys, batch.tags)
        assert queue_content() == before
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)


@pytest.mark.parametrize("verb", [upsample, strip, real_rows])
def test_the_example_of_each_verb_runs_as_it_is_printed(verb):
    found = doctest.DocTestFinder(recurse=False).find(verb, globs=vars(upsampling) | {"batch": put_rows([(5, 3)] * 5)})
    results = [doctest.DocTestRunner().run(example) for example in found]
    assert [(result.failed, result.attempted > 0) for result in results] == [(0, True)]


def test_pads_are_refused_in_a_batch_that_has_some_and_nothing_is_put():
    batch = put_rows([(5, 3), (7, 2)])
    padded = upsample(batch, 3)
    content = queue_content()
    with pytest.raises(PaddingDataError, match="tagged is_padding"):
        upsample(padded, 2)
    with pytest.raises(ValueError, match="multiple=0"):
        upsample(batch, 0)
    assert queue_content() == content


def test_a_field_without_a_role_is_refused_unless_one_is_given():
    batch = put_rows([(5, 5)], odd=[torch.zeros(5)])
    content = queue_content()
    with pytest.raises(PaddingDataError, match="field 'odd'"):
        upsample(batch, 2, length=8)
    assert queue_content() == content
    padded = upsample(batch, 2, length=8, roles={"odd": FieldRole(Role.ROW)})
    assert read_rows(padded.keys[1:], PARTITION)[0]["odd"].shape == (5,)


IS_PAD = [False, True, False, True, True, False]
REAL = [row for row, is_pad in enumerate(IS_PAD) if not is_pad]
TAGS = [{"seq_len": row} | ({"is_padding": True} if is_pad else {}) for row, is_pad in enumerate(IS_PAD)]


def worker_data(is_padding):
    rows = [torch.arange(1 + row) for row in range(len(IS_PAD))]
    fields = {
        "row": torch.arange(len(IS_PAD)),
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "name": NonTensorStack(*[f"row {row}" for row in range(len(IS_PAD))]),
        "is_padding": is_padding,
    }
    return TensorDict(fields, batch_size=len(IS_PAD))


def test_a_batch_of_keys_keeps_its_real_ones_with_their_tags_and_so_do_tags_alone():
    batch = KVBatchMeta(keys=[f"p_{row}_0" for row in range(6)], tags=TAGS, partition_id="train", fields=["ids"])
    kept = real_rows(batch)
    assert kept.keys == [f"p_{row}_0" for row in REAL]
    assert [tag["seq_len"] for tag in kept.tags] == REAL
    assert (kept.partition_id, kept.fields) == ("train", ["ids"])
    assert real_rows(TAGS) == real_rows(tuple(TAGS)) == kept.tags


@pytest.mark.parametrize(
    "is_padding",
    [torch.tensor(IS_PAD), torch.tensor(IS_PAD)[:, None], NonTensorStack(*IS_PAD)],
    ids=["column", "column of one", "no tensor"],
)
def test_worker_data_keeps_rows_of_every_kind_of_field(is_padding):
    kept = real_rows(worker_data(is_padding))
    assert kept["row"].tolist() == REAL
    assert [len(ids) for ids in kept["ids"].unbind()] == [1 + row for row in REAL]
    assert list(kept["name"]) == [f"row {row}" for row in REAL]


def test_a_data_proto_is_filtered_wherever_its_column_is():
    batch = TensorDict({"row": torch.arange(6), "is_padding": torch.tensor(IS_PAD)}, batch_size=6)
    kept = real_rows(DataProto(batch=batch, non_tensor_batch={"uid": np.array(list("abcdef"), dtype=object)}))
    assert kept.batch["row"].tolist() == REAL
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "c", "f"]
    arrays = {"uid": np.array(list("ab"), dtype=object), "is_padding": np.array([True, False])}
    assert real_rows(DataProto(non_tensor_batch=arrays)).non_tensor_batch["uid"].tolist() == ["b"]


def test_worker_data_of_pads_alone_is_told_by_name():
    with pytest.raises(PaddingDataError, match="6 rows, and only pads"):
        real_rows(worker_data(torch.ones(6, dtype=torch.bool)))
