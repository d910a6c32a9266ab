"""A pad looks like a row: same fields, dtypes and ranks, in a pad's own lengths."""

from collections import UserDict
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest
import torch

from tests.support.padded_rows import values_of
from tests.support.rows_in_queue import row_fields
from verl_padding.errors import PaddingDataError
from verl_padding.pads.field_kinds import KNOWN_FIELDS, FieldFormat, Fill, Kind
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.vision_families import SmallestImage

EOS = 7
LENGTHS = [(5, 3), (9, 2), (4, 6)]


def rows_with(**fields):
    """Rows of different lengths, each with extra fields: name -> function of (prompt, response)."""
    return [
        row_fields(prompt, response, "u")
        | {name: make(prompt, response) for name, make in fields.items()}
        for prompt, response in LENGTHS
    ]


def pad_of(rows, pad_length=4, declared=None):
    template = PadTemplate(eos_token_id=EOS, length=pad_length, schema=Schema(declared))
    return values_of(template.fields(rows))


@pytest.mark.parametrize("pad_length", [2, 3, 16])
def test_every_field_of_a_text_row_agrees_with_the_pads_lengths(pad_length):
    rows = rows_with()
    pad = pad_of(rows, pad_length)
    assert pad.keys() == rows[0].keys()
    tensors = [name for name, value in pad.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9
    for name in tensors:
        assert pad[name].shape[-1] == KNOWN_FIELDS[name].kind.tokens(pad_length - 1, 1), name
        assert pad[name].dtype == rows[0][name].dtype, name
    assert torch.equal(pad["input_ids"], torch.cat([pad["prompts"], pad["responses"]]))
    assert set(pad["input_ids"].tolist()) == {EOS}
    assert pad["attention_mask"].tolist() == [1] * pad_length
    assert pad["loss_mask"].tolist() == pad["response_mask"].tolist() == [0]
    assert pad["reward_model"] == pad["extra_fields"] == pad["multi_modal_inputs"] == {}
    assert (pad["raw_prompt"], pad["data_source"], pad["num_turns"]) == ([], "", 0)


def test_a_field_that_fits_two_kinds_or_none_is_refused():
    def refused(rows, message):
        with pytest.raises(PaddingDataError, match=message):
            pad_of(rows)

    alike = [row_fields(4, 4, "u") | {"custom": torch.ones(4)}]
    refused(alike, r"^field 'custom': its kind is unclear.* \[\(4,\)\].* fit prompt and response")
    odd = rows_with(custom=lambda p, r: torch.ones(p * r))
    refused(odd, r"^field 'custom': .* \[\(15,\), .* fit no kind\. .*\+padding\.fields\.custom=")
    refused(
        [row_fields(4, r, "u") | {"custom": torch.ones(4)} for r in (2, 3)], r"fit prompt and row\."
    )


def test_a_declared_kind_goes_before_what_shapes_say():
    shared_prompt = [row_fields(4, r, "u") | {"custom": torch.full((4,), 9)} for r in (2, 3)]
    assert (
        pad_of(shared_prompt, declared={"custom": FieldFormat(Kind.ROW)})["custom"].tolist()
        == [0] * 4
    )
    prompt = FieldFormat(Kind.PROMPT, Fill.EOS)
    assert pad_of(shared_prompt, declared={"custom": prompt})["custom"].tolist() == [EOS] * 3
    with pytest.raises(PaddingDataError, match=r"are not those of kind response\."):
        pad_of(shared_prompt, declared={"custom": FieldFormat(Kind.RESPONSE)})


def test_a_list_has_no_value_a_token():
    rows = rows_with(custom=lambda p, r: [1.5] * r, tools=lambda p, r: [{"name": "search"}])
    assert pad_of(rows)["custom"] == pad_of(rows)["tools"] == []
    declared_kind = r"^field 'custom': .* kind response\. Store it as a tensor"
    with pytest.raises(PaddingDataError, match=declared_kind):
        pad_of(rows, declared={"custom": FieldFormat(Kind.RESPONSE)})


@pytest.mark.parametrize("as_found", [list, np.array])
def test_a_known_field_of_tokens_that_is_no_tensor_is_refused(as_found):
    rows = rows_with(rm_scores=lambda prompt, response: as_found([0.0] * response))
    with pytest.raises(PaddingDataError, match=r"rm_scores.* Store it as a tensor"):
        pad_of(rows)


def test_routes_are_distinct_in_range_and_even_over_the_experts():
    shape = (48, 8)
    rows = rows_with(
        routed_experts=lambda p, r: torch.full((p + r, *shape), 127, dtype=torch.uint8)
    )
    template = PadTemplate(eos_token_id=EOS, length=4)
    routes = template.fields(rows, n_pads=33)["routed_experts"].numpy()
    assert (routes.shape, routes.dtype) == ((33, 4, *shape), np.uint8)
    assert all(len(set(slots)) == 8 for slots in routes.reshape(-1, 8).tolist())
    for layer in range(shape[0]):
        load = np.bincount(routes[:, :, layer].ravel(), minlength=128)
        assert len(load) == 128
        assert load.max() - load.min() <= 1
        # The 16 slots of two tokens: no expert-parallel rank of 16 experts gets more than its share
        # by more than one.
        few = np.bincount(routes[0, :2, layer].ravel() // 16, minlength=8)
        assert few.max() <= 3


def test_routes_reach_the_experts_of_every_source_row():
    rows = rows_with(routed_experts=lambda p, r: torch.tensor([0, r]).expand(p + r, 1, 2))
    routes = PadTemplate(eos_token_id=EOS, length=4).fields(rows, n_pads=2)
    assert set(routes["routed_experts"].flatten().tolist()) == set(range(1 + 6))


@pytest.mark.parametrize("experts", [(3, 11, 6, 9), (0, 0, 0, 0)])
def test_routes_are_distinct_and_stay_among_those_of_the_rows(experts):
    rows = rows_with(routed_experts=lambda p, r: torch.tensor(experts).expand(p + r, 2, 4))
    routes = PadTemplate(eos_token_id=EOS, length=4).fields(rows)
    assert 0 <= routes["routed_experts"].min() <= routes["routed_experts"].max() <= max(*experts, 3)
    assert all(len(set(each)) == 4 for each in routes["routed_experts"].reshape(-1, 4).tolist())


def test_a_pads_picture_is_in_its_inputs_and_at_the_end_of_its_prompt():
    image = SmallestImage({"pixel_values": torch.zeros(4, 6)}, (90, 91, 92))
    pad = values_of(PadTemplate(eos_token_id=EOS, length=6, image=image).fields(rows_with()))
    assert pad["prompts"].tolist() == [EOS, EOS, 90, 91, 92]
    assert pad["input_ids"].tolist() == [EOS, EOS, 90, 91, 92, EOS]
    assert pad["multi_modal_inputs"].keys() == image.inputs.keys()
    with pytest.raises(PaddingDataError, match=r"^length=3: .* 4"):
        PadTemplate(eos_token_id=EOS, length=3, image=image)


@dataclass
class Verdict:
    passed: bool


NEUTRAL = [
    (True, False),
    (3, 0),
    ("text", ""),
    ([1], []),
    ({"style": {"kind": ["rule", None]}}, {}),
    (UserDict({"pixel_values": 1}), {}),
    (None, None),
    (np.float64(0.5), np.float64(0)),
    (np.datetime64("2026-01-01"), np.datetime64("1970-01-01")),
    (Decimal("0.1"), None),
    (Verdict(True), None),
]


@pytest.mark.parametrize(("value", "neutral"), NEUTRAL, ids=[repr(value) for value, _ in NEUTRAL])
def test_a_value_that_is_no_tensor_leaves_nothing_but_its_type(value, neutral):
    made = pad_of(rows_with(custom=lambda p, r: value))["custom"]
    assert type(made) is type(neutral)
    assert made == neutral


def test_kinds_between_which_a_pad_makes_no_difference_need_no_choice():
    one_token = [
        row_fields(p, 1, "u") | {"custom": torch.ones(1, dtype=torch.uint8)} for p in (4, 5)
    ]
    made = pad_of(one_token)["custom"]  # one value a response token, or one a row
    assert (made.tolist(), made.dtype) == ([0], torch.uint8)
    alike = [row_fields(4, 4, "u") | {"custom": torch.ones(4, 2)}]
    assert pad_of(alike, pad_length=2)["custom"].tolist() == [
        [0.0, 0.0]
    ]  # a prompt of one token, a response of one
