"""What tags may say of a row's tokens."""

import math

import numpy as np
import pytest
import torch

from tests.support.rows_in_queue import row_tag
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import LENGTH_TAGS, refuse_other_lengths, tokens_of_tags

NO_COUNTS = [None, math.nan, math.inf, 7.9, 8.0, "8", 2**70, -3, True, [8], torch.tensor([5, 3])]


def test_tokens_are_those_of_seq_len_in_whole_numbers_of_any_kind():
    tags = [row_tag(5, 3), {"seq_len": np.int64(9)}, {"seq_len": torch.tensor(4), "prompt_len": np.int32(2)}]
    tokens = tokens_of_tags(["a_0_0", "b_0_0", "c_0_0"], tags)
    assert tokens == [8, 9, 4]
    assert {type(count) for count in tokens} == {int}


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("name", LENGTH_TAGS)
def test_a_length_that_is_no_number_of_tokens_is_refused_with_row_tag_value_and_fix(name, value):
    tags = [row_tag(5, 3), row_tag(5, 3) | {name: value}]
    with pytest.raises(PaddingDataError, match=r", but a whole number .*Tag each row") as told:
        tokens_of_tags(["a_0_0", "b_0_0"], tags)
    assert str(told.value).startswith(f"row 'b_0_0': tag {name}={value!r}, but")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({"prompt_len": 5, "response_len": 3}, "no tag seq_len. Tag each row"),
        (
            row_tag(5, 3) | {"seq_len": 9},
            "tags prompt_len=5, response_len=3, seq_len=9, which do not add up. Tag each row",
        ),
        ({"seq_len": 0}, "tag seq_len=0, but a whole number of tokens from 1"),
        (row_tag(0, 3), "prompt_len=0. verl takes the log-prob of the first response token from the last"),
    ],
)
def test_lengths_that_are_not_there_or_contradict_each_other_are_refused(tag, message):
    with pytest.raises(PaddingDataError) as told:
        tokens_of_tags(["b_0_0"], [tag])
    assert str(told.value).startswith(f"row 'b_0_0': {message}")


def test_tags_that_are_not_those_of_the_rows_fields_are_refused():
    refuse_other_lengths("a_0_0", row_tag(5, 3), 5, 3)
    refuse_other_lengths("a_0_0", {"seq_len": 8}, 5, 3)
    with pytest.raises(PaddingDataError, match=r"^row 'a_0_0': tag prompt_len=4, but its fields have 5 prompt and 3"):
        refuse_other_lengths("a_0_0", row_tag(4, 4), 5, 3)
    with pytest.raises(PaddingDataError, match=r"^row 'a_0_0': prompt_len=0\. verl takes"):
        refuse_other_lengths("a_0_0", {"seq_len": 3}, 0, 3)
