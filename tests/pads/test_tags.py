"""What tags say of a row's tokens; lengths that are not those of the fields are refused in
tests/driver."""

import numpy as np
import torch

from tests.support.rows_in_queue import row_tag
from verl_padding.pads.tags import tokens_of_tags


def test_tokens_are_those_of_seq_len_in_whole_numbers_of_any_kind():
    tokens = tokens_of_tags([row_tag(5, 3), {"seq_len": np.int64(9)}, {"seq_len": torch.tensor(4)}])
    assert tokens == [8, 9, 4]
    assert {type(count) for count in tokens} == {int}
