"""Rows after an update, read from the real TransferQueue."""

import numpy as np
import pytest
import torch

from tests.support.rows_in_queue import put_rows
from verl_padding.driver.batch_metrics import continued_rows, shared_metrics
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


def test_rows_of_sessions_of_one_row_are_compared_where_that_is_asked_for():
    ids = list(map(torch.tensor, IDS.values()))
    masks = [torch.ones(len(each) - 1, dtype=torch.int64) for each in ids]
    values = [mask.float() for mask in masks]
    batch = put_rows([(1, len(mask)) for mask in masks], list(IDS), input_ids=ids, rm_scores=values, advantages=values)
    every, some = (TrainedRows.read(batch, masks, compare=compare) for compare in (True, False))
    pairs = np.array([(3, 2), (4, 3), (0, 2), (1, 5)]).T
    assert every.forest.shared_by_pairs(*pairs).tolist() == [2, 1, 2, 2]
    assert some.forest.shared_by_pairs(*pairs).tolist() == [2, 1, 0, 0]
    # What metrics ask is the same.
    assert continued_rows(every).tolist() == continued_rows(some).tolist() == [-1, -1, -1, 2, -1, -1]
    assert shared_metrics([every]) == shared_metrics([some])
