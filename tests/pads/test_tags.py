"""What tags may say of a row's tokens; lengths that are not those of the fields are refused in tests/driver."""

import math

import numpy as np
import pytest
import torch

from tests.support.rows_in_queue import row_tag
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import tokens_of_tags


def test_tokens_are_those_of_seq_len_in_whole_numbers_of_any_kind():
    tags = [row_tag(5, 3), {"seq_len": np.int64(9)}, {"seq_len": torch.tensor(4)}]
    tokens = tokens_of_tags(["a_0_0", "b_0_0", "c_0_0"], tags)
    assert tokens == [8, 9, 4]
    assert {type(count) for count in tokens} == {int}


@pytest.mark.parametrize("value", [None, math.nan, 8.0, "8", [8], torch.tensor([5, 3])], ids=repr)
def test_a_length_that_is_no_number_of_tokens_is_refused_with_row_tag_value_and_fix(value):
    with pytest.raises(PaddingDataError, match=r", but a whole number .*Tag each row") as refusal:
        tokens_of_tags(["a_0_0", "b_0_0"], [row_tag(5, 3), {"seq_len": value}])
    assert str(refusal.value).startswith(f"row 'b_0_0': tag seq_len={value!r}, but")


def test_a_row_without_the_tag_is_refused():
    with pytest.raises(PaddingDataError, match=r"^row 'b_0_0': tag seq_len=None, but"):
        tokens_of_tags(["b_0_0"], [{"prompt_len": 5, "response_len": 3}])
