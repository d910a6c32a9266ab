"""What pads need of TransferQueue, from each of its storages."""

import numpy as np
import pytest
import torch

from tests.support.deep_equality import assert_equal
from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, empty_queue, put_rows, put_some_fields, queue_content
from tests.support.storages import STORAGES, connected_to
from verl_padding.pads.queue import list_rows, read_rows
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
    empty_queue()
    assert one_storage.n_values() == before


def content_of(keys):
    """Rows by themselves, and all in one read, where shapes and storages decide what a column is."""
    alone = [read_rows([key], PARTITION)[0] for key in keys]
    together = read_rows(keys, PARTITION)
    return alone, together


@pytest.mark.parametrize("kind", EXTRAS)
def test_pads_lie_beside_the_rows_with_all_their_fields(kind, storage):
    batch = put_rows_of_a_kind(LENGTHS, kind)
    rows, _ = content_of(batch.keys)
    padded = upsample(batch, plan_for(batch, dp_size=4, mini=3), TEMPLATE)
    assert len(padded.pads.keys) > 0
    try:
        for got, want in zip(content_of(batch.keys)[0], rows, strict=True):
            assert_equal(got, want)
        alone, together = content_of([*batch.keys, *padded.pads.keys])
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
