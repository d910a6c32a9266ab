"""The value of each metric of a step's rows, on rows made by hand."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver.batch_metrics import (
    advantage_metrics,
    role_metrics,
    session_counts,
    session_metrics,
    staleness_metrics,
    token_metrics,
)


def test_a_session_counts_once_with_the_score_of_its_last_row():
    first = {
        "a_0_10": MadeRow(prompt="!", response="." * 5, score=1, turns=2),
        "a_0_2": MadeRow(response="." * 3, score=7, turns=4),
        "a_1_0": MadeRow(response="." * 4, score=0, turns=2),
    }
    second = {"b_0_0": MadeRow(response="." * 6, score=0.5, turns=1)}
    assert session_metrics([trained_rows(first), trained_rows(second)]) == {
        "padding/session/score/mean": 0.5,
        "padding/session/response_length/mean": 6.0,
        "padding/session/rows/mean": 4 / 3,
        "padding/session/rows/max": 2,
        "padding/session/rows/p50": 1.0,
        "padding/session/rows/p90": pytest.approx(
            1.8
        ),  # of 1, 1, 2: 0.8 of the way from the second to the third
        "padding/session/rows/p99": pytest.approx(1.98),
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


def test_each_session_that_brought_no_row_has_failed_or_was_empty():
    """Two sessions a prompt: all of a, one of b that came back empty, one of c that failed, none of
    d and of e."""
    updates = [["a_0_0", "a_0_1", "a_1_0", "b_1_0"], ["c_0_0"]]
    rows_of = [trained_rows(dict.fromkeys(keys, MadeRow())) for keys in updates]
    assert session_counts(rows_of, prompts=5, sessions=2, failed=["c", "d"]) == {
        "padding/session/configured/total": 10,
        "padding/session/arrived/total": 4,
        "padding/session/missing/total": 6,
        "padding/session/failed/total": 1 + 2,
        "padding/session/empty/total": 1 + 2,
    }


def test_a_rollout_with_its_own_number_of_sessions_misses_none():
    rows_of = [trained_rows(dict.fromkeys(["a_0_0", "a_1_0", "a_2_0"], MadeRow()))]
    counts = session_counts(rows_of, prompts=1, sessions=2, failed=[])
    assert counts == {"padding/session/arrived/total": 3}


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


def test_tokens_of_a_row_are_those_of_prompt_and_response():
    rows = {f"p{n}_0_0": MadeRow(prompt="?" * 10, response="." * (n + 1)) for n in range(11)}
    assert token_metrics([trained_rows(rows)]) == {
        "padding/rows/tokens/p10": 12.0,  # 11, 12, .. 21 tokens
        "padding/rows/tokens/p50": 16.0,
        "padding/rows/tokens/p90": 20.0,
        "padding/rows/tokens/p99": pytest.approx(20.9),
    }


def test_the_age_of_a_row_is_from_the_oldest_weights_that_sampled_it():
    rows = [
        trained_rows({"a_0_0": MadeRow(made_by=6), "a_1_0": MadeRow(made_by=4)}),
        trained_rows({"b_0_0": MadeRow(made_by=5)}),
    ]
    # Step 7 updates the weights that step 6 has made.
    assert staleness_metrics(rows, step=7) == {
        "padding/rows/staleness/mean": 1.0,
        "padding/rows/staleness/max": 2,
    }
    assert staleness_metrics([trained_rows({"a_0_0": MadeRow(made_by=None)})], step=7) == {}


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
        "padding/rows/zero_advantage/tokens_share": (7 * 2 + 3) / (10 * 2 + 3),
        "padding/prompts/zero_advantage/share": 3 / 5,
    }
