"""Rows in the real TransferQueue: set aside and put back as they were; what earlier runs left is
cleared."""

import logging
from uuid import uuid4

import numpy as np
import pytest
import torch
import transfer_queue as tq

from tests.support.deep_equality import assert_equal
from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import (
    PARTITION,
    empty_queue,
    put_rows,
    put_some_fields,
    queue_content,
)
from tests.support.storages import STORAGES, connected_to
from verl_padding.errors import PaddingDataError
from verl_padding.pads import queue
from verl_padding.pads.queue import (
    clear_leftovers,
    list_rows,
    put_columns,
    read_rows,
    set_aside,
    tags_of,
)
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def content_of(batch):
    return [read_rows([key], PARTITION)[0] for key in batch.keys], queue_content()


def save_on_a_full_disk(batches):
    with set_aside(batches):
        assert queue_content() == {}
        raise OSError("disk full")


def test_rows_of_several_local_updates_come_back_even_after_an_error():
    first, second = put_rows([(5, 3), (7, 2)], colour=["red", "blue"]), put_rows([(5, 3), (4, 4)])
    rows, tags = content_of(first)
    with pytest.raises(OSError, match="disk full"):
        save_on_a_full_disk([first, second])
    assert queue_content() == tags
    for got, want in zip(content_of(first)[0], rows, strict=True):
        assert_equal(got, want)
        assert got["colour"] in {"red", "blue"}
    assert "colour" not in content_of(second)[0][0]


def test_what_an_earlier_run_left_is_cleared_with_a_warning(caplog):
    waiting, trained, pad = uuid4().hex, uuid4().hex, f"pad{uuid4().hex}"
    put_rows([(5, 3), (7, 2)], keys=[f"{waiting}_0_0", f"{waiting}_1_0"])
    tq.kv_put(
        key=waiting,
        partition_id=PARTITION,
        tag={"is_prompt": True, "status": "finished", "global_steps": 1},
    )
    put_rows([(5, 3)] * 3, keys=[f"{trained}_0_0", f"{trained}_0_1", f"{trained}_1_0"])
    pads = put_rows([(1, 1)] * 4, keys=[f"{pad}_{i}_0" for i in range(4)])
    tq.kv_batch_put(
        keys=pads.keys,
        partition_id=PARTITION,
        tags=[{**tag, "is_padding": True} for tag in pads.tags],
    )
    with caplog.at_level(logging.WARNING):
        clear_leftovers(PARTITION)
    assert set(tags_of(PARTITION)) == {waiting, f"{waiting}_0_0", f"{waiting}_1_0"}
    [warning] = [
        record.getMessage() for record in caplog.records if record.name == queue.logger.name
    ]
    assert "cleared 7 keys that an earlier trainer left" in warning
    caplog.clear()
    clear_leftovers(PARTITION)
    assert not [record for record in caplog.records if record.name == queue.logger.name]


def test_columns_leave_the_tags_of_rows_alone():
    batch = put_rows([(5, 3), (7, 2)])
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, tags=[{"status": "seen"}] * 2)
    tags = queue_content()
    put_columns(batch, {"number": torch.arange(2)})
    assert queue_content() == tags
    assert [tags[key]["status"] for key in batch.keys] == ["seen", "seen"]
    assert [int(row["number"]) for row in read_rows(batch.keys, PARTITION)] == [0, 1]


def test_columns_of_a_row_that_was_cleared_are_refused_and_make_no_row():
    batch = put_rows([(5, 3), (7, 2)])
    tq.kv_clear(keys=batch.keys[1:], partition_id=PARTITION)
    with pytest.raises(
        PaddingDataError, match=rf"^row '{batch.keys[1]}': not in TransferQueue \(1 of 2 rows"
    ):
        put_columns(batch, {"number": torch.arange(2)})
    assert list(queue_content()) == batch.keys[:1]


LENGTHS_IN_STORAGES = [(5, 3), (7, 2), (4, 9), (6, 1), (9, 3)]


EXTRAS = {
    "text": lambda _length, _response: {},
    "vision": lambda length, _response: {
        "position_ids": torch.arange(4 * length).reshape(4, length),
        "multi_modal_inputs": {
            "pixel_values": torch.rand(length, 6),
            "image_grid_thw": torch.tensor([[1, 2, 3]]),
        },
    },
    "mixture of experts": lambda length, _response: {
        "routed_experts": torch.randint(0, 8, (length, 2, 3), dtype=torch.uint8)
    },
    "distillation": lambda length, _response: {
        "teacher_ids": torch.randint(0, 99, (length, 5), dtype=torch.int32),
        "teacher_logprobs": -torch.rand(length, 5, dtype=torch.float64),
    },
    "fields of a user": lambda _length, response: {
        "weights": torch.rand(response, dtype=torch.bfloat16),
        "scores": np.arange(response, dtype=np.float32),
        "budget": torch.tensor(3.5),
        "note": None,
        "tools": ["search", {"name": "run"}],
    },
}


TEMPLATE = PadTemplate(eos_token_id=3, length=2, n_experts=lambda: 8)


def put_rows_of_a_kind(lengths, kind):
    rows = [EXTRAS[kind](prompt + response, response) for prompt, response in lengths]
    return put_rows(lengths, **{name: [row[name] for row in rows] for name in rows[0]})


@pytest.fixture(scope="module", params=STORAGES)
def one_storage(request, transfer_queue, tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        connected_to(request.param, monkeypatch, tmp_path_factory.mktemp("disk")) as storage,
    ):
        yield storage


@pytest.fixture
def storage(one_storage):
    """One of them, empty again after the test: a value that is left would be left of every step."""
    before = one_storage.n_values()
    yield one_storage
    empty_queue()
    assert one_storage.n_values() == before


def alone_and_together(keys):
    """Rows by themselves, and all in one read, where shapes and storages decide what a column
    is."""
    alone = [read_rows([key], PARTITION)[0] for key in keys]
    together = read_rows(keys, PARTITION)
    return alone, together


@pytest.mark.parametrize("kind", EXTRAS)
def test_pads_lie_beside_the_rows_with_all_their_fields(kind, storage):
    batch = put_rows_of_a_kind(LENGTHS_IN_STORAGES, kind)
    rows, _ = alone_and_together(batch.keys)
    padded = upsample(batch, plan_for(batch, dp_size=4, mini=3), TEMPLATE)
    assert len(padded.pads.keys) > 0
    try:
        for got, want in zip(alone_and_together(batch.keys)[0], rows, strict=True):
            assert_equal(got, want)
        alone, together = alone_and_together([*batch.keys, *padded.pads.keys])
        for one, among_all in zip(alone, together, strict=True):
            assert_equal(among_all, one)
        for pad in alone[len(batch) :]:
            assert pad.keys() == rows[0].keys()
            assert len(pad["input_ids"]) == 2
            assert not bool(pad["loss_mask"].any())
    finally:
        strip(padded.pads)
    assert set(queue_content()) == set(batch.keys)


def test_rows_with_fields_of_their_own_are_listed(storage):
    batch = put_some_fields(
        LENGTHS_IN_STORAGES[:3], [{"note": "a"}, {}, {"note": "b", "score": 1.5}]
    )
    listing = list_rows(batch.keys, PARTITION)
    own = [sorted(names & {"note", "score"}) for names in listing.keys_by_fields]
    assert sorted(own) == [[], ["note"], ["note", "score"]]
    prompts = dict(zip(batch.keys, [prompt for prompt, _ in LENGTHS_IN_STORAGES], strict=False))
    assert {key: shape[0] for key, shape in listing.shapes["prompts"].items()} == prompts
    padded = upsample(batch, plan_for(batch, dp_size=4, mini=2), TEMPLATE)
    for pad in read_rows(padded.pads.keys, PARTITION):
        assert {"note", "score"} <= pad.keys()
    strip(padded.pads)
