"""The value of each metric of a step's rows, on rows made by hand."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from benchmarks.one_gpu.rows import nested
from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver.batch_metrics import (
    TrainedRows,
    advantage_metrics,
    role_metrics,
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
    fields["num_turns"] = torch.tensor([2, 2, 4])
    rows = TrainedRows.from_fields(batch, TensorDict(fields, 3), masks, [None] * 3)
    assert (rows.response_R.tolist(), rows.trained_R.tolist()) == ([3, 2, 1], [2, 0, 1])
    np.testing.assert_equal(rows.advantage_R, [-1.0, np.nan, 0.0])
    assert rows.has_advantage_R.tolist() == [True, False, False]
    assert rows.reward_R.tolist() == [1.5, 2.0, 3.0]
    assert rows.turns_R.tolist() == [2.0, 2.0, 4.0]


def test_a_session_counts_once_with_the_score_of_its_last_row():
    first = {
        "a_0_10": MadeRow(prompt="!", response="." * 5, score=1, turns=2),
        "a_0_2": MadeRow(response="." * 3, score=7, turns=4),
        "a_1_0": MadeRow(response="." * 4, score=0, turns=2),
    }
    second = {"b_0_0": MadeRow(response="." * 6, score=0.5, turns=1)}
    assert session_metrics([trained_rows(first), trained_rows(second)]) == {
        "padding/session/score/mean": 0.5,
        "padding/session/arrived/total": 3,
        "padding/session/response_length/mean": 6.0,
        "padding/session/rows/mean": 4 / 3,
        "padding/session/rows/max": 2,
        "padding/session/num_turns/mean": 3.0,
    }


@given(st.data())
def test_session_metrics_do_not_depend_on_how_sessions_are_split(data):
    def measured(parts):
        """With rows by the turns of a session at which each begins its response, and ends."""
        rows = {}
        for (session, turns), ends in zip(contexts.items(), parts, strict=True):
            for index, (start, end) in enumerate(ends):
                before, said = "".join(turns[:start]), "".join(turns[start:end])
                key = f"{session}_{index}"
                rows[key] = MadeRow(prompt="??" + before, response=said, turns=2 * end)
        found = session_metrics([trained_rows(rows)])
        return {name: value for name, value in found.items() if "/rows/" not in name}

    letters = iter(map(chr, range(100, 1000)))
    lengths = st.lists(st.integers(1, 4), min_size=1, max_size=5)
    contexts = {
        f"{uid}_{number}": ["".join(islice(letters, n)) for n in data.draw(lengths)]
        for uid in "ab"
        for number in range(2)
    }
    split = []
    for turns in contexts.values():
        inner = st.sets(st.integers(1, len(turns)))
        ends = sorted(data.draw(inner) | {len(turns)})
        starts = [data.draw(st.integers(0, done)) for done in [0, *ends[:-1]]]
        split.append(list(zip(starts, ends, strict=True)))
    whole = [[(0, len(turns))] for turns in contexts.values()]
    assert measured(split) == measured(whole)


def test_a_role_has_the_score_of_its_last_row_in_each_session():
    first = {
        "a_0_0": MadeRow(score=1),
        "a_0_1": MadeRow(score=3),
        "a_0_2": MadeRow(score=5),
        "a_1_0": MadeRow(score=0),
    }
    second = {"b_0_0": MadeRow(score=2)}
    roles_of = [["sub", "sub", "lead", "lead"], ["lead"]]
    assert role_metrics([trained_rows(first), trained_rows(second)], roles_of) == {
        "padding/role/lead/rows/total": 3,
        "padding/role/lead/score/mean": pytest.approx(7 / 3),
        "padding/role/sub/rows/total": 2,
        "padding/role/sub/score/mean": 3.0,
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
