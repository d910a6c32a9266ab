"""The value of each metric of a step's rows, on rows made by hand."""

import pytest
from omegaconf import OmegaConf

from tests.support.branching_rows import branching_rows
from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver.batch_metrics import (
    advantage_metrics,
    age_metrics,
    continued_rows,
    session_metrics,
    shared_metrics,
    token_metrics,
)
from verl_padding.plan.row_keys import index_of_key, session_of_key


def algorithm(estimator: str = "grpo", *, kl_in_reward: bool = False):
    return OmegaConf.create({"adv_estimator": estimator, "use_kl_in_reward": kl_in_reward})


def test_a_session_counts_once_with_the_score_of_its_last_row():
    first = {
        "a_0_10": MadeRow(response="." * 5, score=1, turns=2),
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
        "padding/session/rows/p90": pytest.approx(1.8),  # of 1, 1, 2: 0.8 of the way from the second to the third
        "padding/session/rows/p99": pytest.approx(1.98),
        "padding/session/num_turns/mean": 3.0,
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
    assert age_metrics(rows, step=7) == {"padding/rows/age/mean": 1.0, "padding/rows/age/max": 2}
    assert age_metrics([trained_rows({"a_0_0": MadeRow(made_by=None)})], step=7) == {}


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
        updates = [{key: row for key, row in PROMPTS.items() if (key < "c") is first} for first in (True, False)]
    assert advantage_metrics(list(map(trained_rows, updates)), algorithm()) == {
        "padding/rows/without_advantage/share": 8 / 11,  # all but a_1_0, d_0_0 and d_1_0: d_1_1 has no trained token
        "padding/rows/without_advantage/tokens_share": (7 * 2 + 3) / (10 * 2 + 3),
        "padding/prompts/without_advantage/share": 3 / 5,
        "padding/prompts/all_right/share": 1 / 5,
        "padding/prompts/all_wrong/share": 1 / 5,
        "padding/prompts/rounded_advantage/total": 1,
    }


@pytest.mark.parametrize("other", [algorithm("gae"), algorithm(kl_in_reward=True)])
def test_where_equal_scores_may_differ_in_advantage_none_is_called_rounded(other):
    assert "padding/prompts/rounded_advantage/total" not in advantage_metrics([trained_rows(PROMPTS)], other)


@pytest.mark.parametrize(("score", "right", "wrong"), [(1.0, 1, 0), (0.0, 0, 1), (-1.0, 0, 1)])
def test_if_a_step_has_one_score_alone_it_is_right_above_0(score, right, wrong):
    found = advantage_metrics([trained_rows({f"a_{n}_0": MadeRow(score=score) for n in range(2)})], algorithm())
    assert (found["padding/prompts/all_right/share"], found["padding/prompts/all_wrong/share"]) == (right, wrong)


def shared(**sessions: list[tuple[str, str] | tuple[str, str, str]]) -> tuple[float, float, float]:
    """Parted rows, their tokens, and tokens trained again, of sessions by uid."""
    rows = {
        f"{uid}_0_{index}": MadeRow(prompt=prompt, response=response, mask="".join(mask))
        for uid, of_session in sessions.items()
        for index, (prompt, response, *mask) in enumerate(of_session)
    }
    return tuple(shared_metrics([trained_rows(rows), trained_rows({"z_0_0": MadeRow()})]).values())


def test_a_row_that_parts_from_the_row_before_it_is_counted():
    grows, parts = [("abc", "de"), ("abcdef", "g")], [("abc", "de"), ("abcXdef", "g")]
    assert shared(a=grows) == (0, 0, 0)
    assert shared(a=grows, b=parts) == (1, 3, 0)
    assert shared(a=[("abc", "de"), ("xyz", "g")]) == (0, 0, 0), "they begin with different tokens"
    assert shared(a=[("abc", "de"), ("ab", "c")]) == (0, 0, 0), "the row before begins with all of it"
    # The lead's second row goes on from its first one, past a subagent's row, which has its own task.
    assert shared(a=[("abc", "de"), ("abX", "g"), ("abcdef", "g")]) == (1, 2, 0)


def test_tokens_that_are_trained_again_in_a_later_row_are_counted():
    assert shared(a=[("abc", "de"), ("abc", "defg")]) == (0, 0, 2), "d and e"
    assert shared(a=[("abc", "de"), ("abc", "defg", "0011")]) == (0, 0, 0), "trained once each"
    assert shared(a=[("abc", "de"), ("abc", "defg"), ("abc", "defghi", "101111")]) == (0, 0, 2 + 3), "then d, f, g"
    assert shared(a=[("abc", "de"), ("abc", "dX")]) == (1, 4, 0), "two answers that begin alike are two actions"
    assert shared(a=[("abc", "de"), ("abc", "de")]) == (0, 0, 0), "so are two that are equal"
    two_rows_of_one = [("abc", "de"), ("abcdef", "g"), ("abcdeX", "h"), ("abcdef", "gi")]
    assert shared(a=two_rows_of_one) == (0, 0, 1), "g, by the last row; the third one goes on from the first"


@pytest.mark.parametrize("seed", range(5))
def test_a_row_goes_on_from_the_longest_row_that_it_begins_with(seed):
    made = branching_rows(seed, turns=(1, 6, 4))
    text = {key: ("".join(map(chr, prompt)), "".join(map(chr, response))) for key, (prompt, response) in made.items()}
    rows = trained_rows({key: MadeRow(prompt=prompt, response=response) for key, (prompt, response) in text.items()})
    whole = [prompt + response for prompt, response in text.values()]
    want = [-1] * len(whole)
    for row, key in enumerate(text):
        for earlier, other in enumerate(text):
            if session_of_key(other) == session_of_key(key) and index_of_key(other) < index_of_key(key):
                begins = len(whole[earlier]) < len(whole[row]) and whole[row].startswith(whole[earlier])
                if begins and (want[row] < 0 or len(whole[earlier]) > len(whole[want[row]])):
                    want[row] = earlier
    assert continued_rows(rows).tolist() == want
    assert max(want) > -1, "some rows go on"
