"""The value of each metric of a step's rows, on rows made by hand."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from benchmarks.one_gpu.rows import nested
from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver.batch_metrics import (
    TrainedRows,
    advantage_metrics,
    session_metrics,
)


def test_a_row_has_the_mean_advantage_of_its_trained_tokens_and_all_of_its_score():
    columns = {
        "advantages": [[1.0, 9.0, -3.0], [2.0, 2.0], [0.0]],
        "rm_scores": [[0.0, 1.0, 0.5], [0.0, 2.0], [3.0]],
    }
    fields = {name: nested(map(torch.tensor, column)) for name, column in columns.items()}
    masks = [torch.tensor(mask) for mask in ([1, 0, 1], [0, 0], [1])]
    batch = KVBatchMeta(
        keys=["a_0_0", "a_1_0", "b_0_0"], tags=[{"seq_len": tokens} for tokens in (5, 4, 2)]
    )
    rows = TrainedRows.from_fields(batch, TensorDict(fields, 3), masks)
    assert (rows.response_R.tolist(), rows.trained_R.tolist()) == ([3, 2, 1], [2, 0, 1])
    np.testing.assert_equal(rows.advantage_R, [-1.0, np.nan, 0.0])
    assert rows.has_advantage_R.tolist() == [True, False, False]
    assert rows.reward_R.tolist() == [1.5, 2.0, 3.0]


def test_a_session_counts_once_with_the_score_of_its_last_row():
    first = {
        "a_0_10": MadeRow(score=1),
        "a_0_2": MadeRow(score=7),
        "a_1_0": MadeRow(score=0),
    }
    second = {"b_0_0": MadeRow(score=0.5)}
    assert session_metrics([trained_rows(first), trained_rows(second)]) == {
        "padding/session/score/mean": 0.5,
        "padding/session/arrived/total": 3,
        "padding/session/rows/mean": 4 / 3,
        "padding/session/rows/max": 2,
    }


PROMPTS = {
    # All right, and the normalized advantages of one session are not exactly 0.
    "a_0_0": MadeRow(score=1.0),
    "a_1_0": MadeRow(score=1.0, advantage=1e-9),
    # All wrong; the row before the last has another score, and counts for nothing.
    "b_0_0": MadeRow(score=1.0),
    "b_0_1": MadeRow(score=-1.0),
    "b_1_0": MadeRow(score=-1.0),
    # Equal, and neither the best nor the worst of the step.
    "c_0_0": MadeRow(score=0.5),
    "c_1_0": MadeRow(score=0.5),
    # One right, one wrong, in two rows.
    "d_0_0": MadeRow(score=1.0, advantage=1.0),
    "d_1_0": MadeRow(score=-1.0, advantage=-1.0),
    "d_1_1": MadeRow(score=-1.0, advantage=-1.0, response="..", mask="00"),
    # One session has arrived alone.
    "e_0_0": MadeRow(score=1.0),
}


@pytest.mark.parametrize("local_updates", [1, 2])
def test_rows_and_prompts_that_teach_nothing_are_counted(local_updates):
    updates = [PROMPTS]
    if local_updates == 2:
        updates = [
            {key: row for key, row in PROMPTS.items() if (key < "c") is first}
            for first in (True, False)
        ]
    assert advantage_metrics(list(map(trained_rows, updates))) == {
        "padding/rows/zero_advantage/share": 8
        / 11,  # all but a_1_0, d_0_0 and d_1_0: d_1_1 has no trained token
        "padding/prompts/zero_advantage/share": 3 / 5,
    }
