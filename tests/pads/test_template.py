"""A pad looks like a row: same fields, dtypes and ranks, in a pad's own lengths."""

import numpy as np
import pytest
import torch

from tests.pads.rows_in_queue import row_fields
from verl_padding.errors import PaddingDataError
from verl_padding.pads.roles import KNOWN_FIELDS, Role
from verl_padding.pads.template import PadTemplate

EOS = 7
LENGTHS = [(5, 3), (9, 2), (4, 6)]


def rows_with(**fields):
    """Rows of different lengths, each with extra fields: name -> function of (prompt, response)."""
    return [
        row_fields(prompt, response, "u") | {name: make(prompt, response) for name, make in fields.items()}
        for prompt, response in LENGTHS
    ]


def pad_of(rows, pad_length=4):
    return PadTemplate(eos_token_id=EOS, pad_length=pad_length).fields(rows, list(rows[0]))


@pytest.mark.parametrize("pad_length", [2, 3, 16])
def test_every_field_of_a_text_row_agrees_with_the_pads_lengths(pad_length):
    rows = rows_with()
    pad = pad_of(rows, pad_length)
    assert pad.keys() == rows[0].keys()
    lengths = {Role.PROMPT: pad_length - 1, Role.RESPONSE: 1, Role.SEQUENCE: pad_length, Role.POSITIONS: pad_length}
    tensors = [name for name, value in pad.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9
    for name in tensors:
        assert pad[name].shape[-1] == lengths[KNOWN_FIELDS[name].role], name
        assert pad[name].dtype == rows[0][name].dtype, name
    assert torch.equal(pad["input_ids"], torch.cat([pad["prompts"], pad["responses"]]))
    assert set(pad["input_ids"].tolist()) == {EOS}
    assert pad["attention_mask"].tolist() == [1] * pad_length
    assert pad["loss_mask"].tolist() == pad["response_mask"].tolist() == [0]


def test_nothing_of_the_source_row_is_left_in_plain_values():
    pad = pad_of(rows_with())
    assert pad["reward_model"] == pad["extra_fields"] == pad["multi_modal_inputs"] == {}
    assert (pad["raw_prompt"], pad["data_source"], pad["num_turns"]) == ([], "", 0)


@pytest.mark.parametrize("prefix", [(), (3,), (4,)])
def test_position_ids_keep_their_rank(prefix):
    rows = rows_with(position_ids=lambda p, r: torch.arange(p + r, dtype=torch.int32).expand(*prefix, p + r))
    positions = pad_of(rows)["position_ids"]
    assert positions.shape == (*prefix, 4)
    assert positions.dtype == torch.int32
    assert torch.equal(positions, torch.arange(4, dtype=torch.int32).expand(*prefix, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("length", "pad"), [("prompt", 3), ("response", 1), ("sequence", 4)])
def test_an_unknown_field_follows_what_its_length_follows_in_the_real_rows(length, pad, dtype):
    sizes = {"prompt": lambda p, r: p, "response": lambda p, r: r, "sequence": lambda p, r: p + r}
    rows = rows_with(custom=lambda p, r: torch.ones(sizes[length](p, r), 5, dtype=dtype))
    custom = pad_of(rows)["custom"]
    assert custom.shape == (pad, 5)
    assert custom.dtype == dtype
    assert not custom.any()


def test_an_unknown_field_of_one_shape_or_none_is_one_value_a_row():
    rows = rows_with(image=lambda p, r: torch.ones(2, 7), weight=lambda p, r: torch.tensor(3.0))
    pad = pad_of(rows)
    assert pad["image"].shape == (2, 7)
    assert pad["weight"].shape == ()
    assert not pad["image"].any()
    assert not pad["weight"].any()


def test_numpy_arrays_stay_numpy_arrays():
    custom = pad_of(rows_with(custom=lambda p, r: np.ones((p + r, 2), dtype=np.float16)))["custom"]
    assert isinstance(custom, np.ndarray)
    assert (custom.shape, custom.dtype) == ((4, 2), np.float16)


def test_a_field_that_fits_two_roles_or_none_is_refused_with_its_name_and_shapes():
    alike = [row_fields(4, 4, "u") | {"custom": torch.ones(4)}]
    with pytest.raises(
        PaddingDataError, match=r"^field 'custom': role unknown, shapes \[\(4,\)\].* PROMPT and RESPONSE"
    ):
        pad_of(alike)
    odd = rows_with(custom=lambda p, r: torch.ones(p * r))
    with pytest.raises(PaddingDataError, match=r"^field 'custom': role unknown, shapes \[\(15,\), .* fit no role"):
        pad_of(odd)


def test_a_value_without_a_neutral_one_is_refused_with_its_type():
    with pytest.raises(
        PaddingDataError, match=r"^field 'custom': a range has no neutral value for a pad\. Store it as"
    ):
        pad_of(rows_with(custom=lambda p, r: range(3)))
