"""What pads need of TransferQueue, from each of its storages."""

from uuid import uuid4

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict

from tests.support.deep_equality import assert_equal
from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, put_rows, put_some_fields, queue_content
from tests.support.storages import STORAGES, connected_to
from verl_padding.pads.columns import IS_PADDING, REAL_ROWS, REPORTING_RANKS, read_column
from verl_padding.pads.queue import clear, list_rows, read_rows, set_aside, tokens_of_masks
from verl_padding.pads.real_rows import real_rows
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (9, 3)]
EXTRAS = {
    "text": lambda _length, _response: {},
    "vision": lambda length, _response: {
        "position_ids": torch.arange(4 * length).reshape(4, length),
        "multi_modal_inputs": {"pixel_values": torch.rand(length, 6), "image_grid_thw": torch.tensor([[1, 2, 3]])},
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
    if left := list(queue_content()):
        tq.kv_clear(keys=left, partition_id=PARTITION)
    assert one_storage.n_values() == before


def shapes_of(column):
    """Of a column as it was read: its own, or, where it has rows by themselves, theirs."""
    return [tuple(row.shape) for row in column.unbind()] if column.is_nested else tuple(column.shape)


@pytest.mark.parametrize("n_rows", [3, 1])
def test_a_number_of_each_row_is_a_row_of_one_in_a_storage_that_reads_by_shape_alone(n_rows, request, storage):
    batch = put_rows(LENGTHS[:3])
    rows_of_one = torch.nested.as_nested_tensor([torch.ones(1)] * 3, layout=torch.jagged)
    put_some(batch, number=torch.tensor([1.0, 2.0, 3.0]), one_by_one=torch.ones(3, 1), rows_of_one=rows_of_one)
    names = ["number", "one_by_one", "rows_of_one"]
    data = tq.kv_batch_get(keys=batch.keys[:n_rows], partition_id=PARTITION, select_fields=names)
    by_shape = request.node.callspec.params["one_storage"] == "MooncakeStore"
    assert shapes_of(data["number"]) == ([(1,)] * n_rows if by_shape else (n_rows,))
    assert shapes_of(data["one_by_one"]) == shapes_of(data["rows_of_one"]) == [(1,)] * n_rows
    assert read_column(data, "number").tolist() == [1.0, 2.0, 3.0][:n_rows]


def content_of(keys):
    """Rows by themselves, and all in one read, where shapes and storages decide what a column is."""
    alone = [read_rows([key], PARTITION)[0] for key in keys]
    together = read_rows(keys, PARTITION)
    return alone, together


def flat(value):
    """A value with a number for a row of length one, which storages that read by shape make of it."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1) if value.numel() == 1 else value
    return value


def assert_same_values(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert_equal(flat(got[name]), flat(want[name]))


@pytest.mark.parametrize("kind", EXTRAS)
def test_pads_lie_beside_the_rows_with_all_their_fields(kind, storage):
    batch = put_rows_of_a_kind(LENGTHS, kind)
    rows, _ = content_of(batch.keys)
    plan = plan_for(batch, dp_size=4, mini=3)
    padded = upsample(batch, plan, TEMPLATE)
    assert len(padded.pads.keys) > 0
    try:
        for got, want in zip(content_of(batch.keys)[0], rows, strict=True):
            assert_same_values(got, want)
        alone, together = content_of([*batch.keys, *padded.pads.keys])
        for one, among_all in zip(alone, together, strict=True):
            assert_same_values(among_all, one)
        for pad in alone[len(batch) :]:
            assert pad.keys() == rows[0].keys()
            assert len(pad["input_ids"]) == 2
            assert not bool(pad["loss_mask"].any())
    finally:
        strip(padded.pads)
    assert set(queue_content()) == set(batch.keys)


@pytest.mark.parametrize("call", ["log_prob", "actor"])
def test_a_call_reads_what_it_was_told_of_each_row(call, storage):
    batch = put_rows(LENGTHS)
    plan = plan_for(batch, dp_size=4, mini=3)
    padded = upsample(batch, plan, TEMPLATE)
    rows = padded.update_call(call, batch) if call == "actor" else padded.inference_call(call, batch)
    layout = plan.layouts[call]
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
    is_pad = [row >= len(batch) for row in layout.order]
    assert 0 < sum(is_pad) < len(is_pad)
    assert read_column(data, IS_PADDING).tolist() == is_pad
    assert len(real_rows(data)) == len(batch) * (len(is_pad) - sum(is_pad)) // len(batch)
    if call == "actor":
        of_row = [m for rank in range(4) for m in range(layout.n_mini_batches) for _ in range(layout.rows_per_cell)]
        assert read_column(data, REAL_ROWS).tolist() == [layout.real_rows_M[m] for m in of_row]
        assert read_column(data, REPORTING_RANKS).tolist() == [layout.reporting_ranks_M[m] for m in of_row]
    strip(padded.pads)


def test_fields_that_workers_put_later_are_read_beside_pads(storage):
    batch = put_rows(LENGTHS)
    padded = upsample(batch, plan_for(batch, dp_size=4, mini=3), TEMPLATE)
    responses = [torch.rand(response) for _, response in LENGTHS]
    put_some(batch, advantages=torch.nested.as_nested_tensor(responses, layout=torch.jagged))
    rows = padded.update_call("actor", batch)
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION, select_fields=["advantages", "responses"])
    for advantages, response in zip(data["advantages"].unbind(), data["responses"].unbind(), strict=True):
        assert advantages.shape == response.shape
    assert tokens_of_masks(batch, "response_mask") == [response for _, response in LENGTHS]
    strip(padded.pads)


def put_some(batch, **columns):
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=TensorDict(columns, batch_size=len(batch)))


@pytest.mark.parametrize("kind", EXTRAS)
def test_rows_that_were_set_aside_come_back_as_they_were(kind, storage):
    batch = put_rows_of_a_kind(LENGTHS, kind)
    rows, tags = content_of(batch.keys)[0], queue_content()
    with set_aside([batch]):
        assert not queue_content()
    assert queue_content() == tags
    for got, want in zip(content_of(batch.keys)[0], rows, strict=True):
        assert_same_values(got, want)


def test_rows_with_fields_of_their_own_are_listed_and_their_pads_have_them_all(storage):
    batch = put_some_fields(LENGTHS[:3], [{"note": "a"}, {}, {"note": "b", "score": 1.5}])
    listing = list_rows(batch.keys, PARTITION)
    own = [sorted(names & {"note", "score"}) for names in listing.keys_by_fields]
    assert sorted(own) == [[], ["note"], ["note", "score"]]
    prompts = dict(zip(batch.keys, [prompt for prompt, _ in LENGTHS], strict=False))
    assert {key: shape[0] for key, shape in listing.shapes["prompts"].items()} == prompts
    padded = upsample(batch, plan_for(batch, dp_size=4, mini=2), TEMPLATE)
    for pad in read_rows(padded.pads.keys, PARTITION):
        assert {"note", "score"} <= pad.keys()
    strip(padded.pads)
    for key in batch.keys:  # one by one: see below
        clear([key], PARTITION)


def test_transfer_queue_keeps_values_of_fields_that_only_some_cleared_rows_have(request, one_storage):
    # verl clears the rows of a step in one call. When this fails, take the line out of docs/limits.md.
    before = one_storage.n_values()
    batch = put_some_fields(LENGTHS[:3], [{"note": "a"}, {}, {"note": "b", "score": 1.5}])
    clear(batch.keys, PARTITION)
    assert not queue_content()
    by_key = not request.node.callspec.id.startswith("SimpleStorage")
    assert one_storage.n_values() - before == (3 if by_key else 0)


def test_verls_prompts_can_be_cleared_from_simple_storage_only(request, one_storage):
    # verl's replay buffer clears prompts, which have a tag and no field, when it samples their rows. When this fails,
    # run the job on a disk of tests/end_to_end/test_padded_jobs.py with a storage by key, and take the refusal out of
    # job_reader.py, and the line out of docs/limits.md.
    key = uuid4().hex
    tq.kv_put(key=key, partition_id=PARTITION, tag={"is_prompt": True})
    if request.node.callspec.id.startswith("SimpleStorage"):
        clear([key], PARTITION)
    else:
        with pytest.raises(RuntimeError, match="lack of `field_names`"):
            clear([key], PARTITION)
        tq.kv_put(key=key, partition_id=PARTITION, fields={"note": "a field to clear it by"})
        clear([key], PARTITION)
    assert not queue_content()
