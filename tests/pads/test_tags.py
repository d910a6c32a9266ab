"""What tags may say of a row's tokens; lengths that are not those of the fields are refused in
tests/driver."""

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


@pytest.mark.parametrize(
    "tag", [{"prompt_len": 5}, *({"seq_len": value} for value in (None, 8.0, "8", [8]))], ids=repr
)
def test_a_length_that_is_no_number_of_tokens_is_refused(tag):
    with pytest.raises(
        PaddingDataError, match=r"^row 'b_0_0': tag seq_len=.*, but a whole number .*Tag each row"
    ):
        tokens_of_tags(["a_0_0", "b_0_0"], [row_tag(5, 3), tag])
