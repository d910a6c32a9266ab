"""Whether two rows that begin alike may have the same outputs."""

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.support.token_rows import rows_of
from verl_padding.prefix_sharing.row_inputs import RowInputs

TOKENS = [5, 6, 7], [5, 6, 7, 8, 5]


def shared(**fields):
    return RowInputs(rows_of(TOKENS, **fields)).shared(1, 0)


def per_token(shorter, longer, *shape):
    """A field of a row of 3 tokens and of one of 5."""
    return [torch.full((3, *shape), shorter), torch.full((5, *shape), longer)]


def images(shorter, longer):
    return [{"pixel_values": torch.full((n, 4), pixel)} for n, pixel in ((2, shorter), (6, longer))]


def positions(first):
    """Of four axes; those of the longer row begin with ``first``."""
    return [torch.arange(3).repeat(4, 1), torch.arange(first, first + 5).repeat(4, 1)]


@pytest.mark.parametrize(
    "fields",
    [
        {"position_ids": [torch.arange(3) + 1, torch.arange(5)]},
        {"position_ids": positions(first=1)},
        {"routed_experts": per_token(0, 1, 2, 2)},
        {"teacher_ids": per_token(0, 1, 4)},
        {"teacher_logprobs": per_token(0.0, 1.0, 4)},
        {"multi_modal_inputs": images(0.0, 1.0)},
        {"multi_modal_inputs": [images(0.0, 1.0)[0], {}]},
        {"multi_modal_inputs": [{"scale": torch.tensor(2.0)}, {"scale": torch.tensor(1.0)}]},
        {"multi_modal_inputs": [{}, {"boxes": [1]}]},
        {"temperature": [1.0, 0.5]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_rows_share_only_where_all_that_their_outputs_depend_on_is_equal(fields):
    assert shared() == 3
    assert shared(**fields) == 0


# verl ends each row's with a line of zeros.
TEACHERS = [torch.tensor([[1.0]] * n + [[0.0]]) for n in (2, 4)]


@pytest.mark.parametrize(
    "fields",
    [
        {"position_ids": positions(first=0)},
        {"routed_experts": per_token(1, 1, 2, 2)},
        {"teacher_logprobs": TEACHERS},
        {"multi_modal_inputs": images(1.0, 1.0)},
        {"multi_modal_inputs": [{}, images(1.0, 1.0)[1]]},
        {"multi_modal_inputs": [{}, images(1.0, 1.0)[1] | {"mm_token_type_ids": None}]},
        {"temperature": [0.5, 0.5]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_they_share_where_it_is_whatever_the_longer_row_has_beyond(fields):
    assert shared(**fields) == 3


def test_they_share_under_a_temperature_of_the_whole_call():
    for temperature in (0.5, torch.tensor(0.5)):
        data = rows_of(TOKENS)
        tu.assign_non_tensor(data, temperature=temperature)
        assert RowInputs(data).shared(1, 0) == 3
