"""What rows earned and were trained on, of rows made by hand."""

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from benchmarks.one_gpu.rows import nested
from verl_padding.driver.batch_metrics import TrainedRows


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
    fields["num_turns"] = torch.tensor([2, 2, 4])
    rows = TrainedRows.from_fields(batch, TensorDict(fields, 3), masks, [None] * 3)
    assert (rows.response_R.tolist(), rows.trained_R.tolist()) == ([3, 2, 1], [2, 0, 1])
    np.testing.assert_equal(rows.advantage_R, [-1.0, np.nan, 0.0])
    assert rows.has_advantage_R.tolist() == [True, False, False]
    assert rows.reward_R.tolist() == [1.5, 2.0, 3.0]
    assert rows.turns_R.tolist() == [2.0, 2.0, 4.0]
