"""Rows after an update, read from the real TransferQueue."""

import numpy as np
import pytest
import torch

from tests.support.rows_in_queue import put_rows
from verl_padding.driver.trained_rows import TrainedRows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

IDS = {
    "a_0_0": [7, 1, 2],
    "b_0_0": [8, 1],
    "a_1_0": [7, 1],
    "a_1_1": [7, 1, 3],
    "a_1_2": [7, 4],
    "b_1_0": [8, 1, 1],
}


def test_rows_of_a_prompt_are_compared_where_that_is_asked_for():
    ids = list(map(torch.tensor, IDS.values()))
    masks = [torch.ones(len(each) - 1, dtype=torch.int64) for each in ids]
    values = [mask.float() for mask in masks]
    batch = put_rows([(1, len(mask)) for mask in masks], list(IDS), input_ids=ids, rm_scores=values, advantages=values)
    forest = TrainedRows.read(batch, masks, compare=True).forest
    pairs = np.array([(3, 2), (4, 3), (0, 2), (1, 5), (0, 1)]).T
    assert forest.shared_by_pairs(*pairs).tolist() == [2, 1, 2, 2, 0]
    assert TrainedRows.read(batch, masks, compare=False).forest is None
