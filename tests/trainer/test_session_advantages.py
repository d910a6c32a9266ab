"""Advantages of whole sessions, from verl's own estimators, against formulas written out."""

import itertools
import math
from collections import defaultdict
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tests.equivalence.test_advantages import VERLS_LIMITS
from tests.support.losses_on_rows import nested
from tests.support.verl_config import compose_job
from verl_padding.plan.row_keys import uid_of_key
from verl_padding.trainer.session_advantages import session_advantages, trajectories

ESTIMATORS = sorted(set(ADV_ESTIMATOR_REGISTRY) - VERLS_LIMITS.keys())
GAMMA, LAM = 0.9, 0.8
KEYS = ["a_0_0", "a_0_1", "a_1_0", "a_0_10", "a_0_2", "b_0_0", "b_1_0", "b_1_1", "b_2_0"]
"""Two prompts; a session of four rows, which are not in order, one of two, three of one."""
MASKS = [[1, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1, 1], [1], [1, 1], [1, 0, 1], [1, 1, 1, 1], [1]]
SESSIONS = {"a_0": [0, 1, 4, 3], "a_1": [2], "b_0": [5], "b_1": [6, 7], "b_2": [8]}
"""Rows of each session, in the order of its trajectory."""
SCORES = {"a_0": 1.0, "a_1": -0.5, "b_0": 2.0, "b_1": 0.25, "b_2": 0.75}


def fields_of_rows(masks=MASKS, keys=KEYS, *, kl: bool = False) -> dict[str, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(len(mask), generator=draw, dtype=torch.float64) for mask in masks]
    # verl's agent loop gives every row the session's reward.
    scores = [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
    for row, key in enumerate(keys):
        scores[row][-1] = SCORES[key.rsplit("_", 1)[0]]
    fields = {"response_mask": [torch.tensor(mask) for mask in masks], "rm_scores": scores, "values": values}
    if kl:
        penalties = [torch.rand(len(mask), generator=draw, dtype=torch.float64) * torch.tensor(mask) for mask in masks]
        fields["token_level_rewards"] = [score - p for score, p in zip(scores, penalties, strict=True)]
    return fields


def as_rows(fields) -> TensorDict:
    return TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=len(fields["rm_scores"]))


def algorithm_of(estimator: str):
    critic = ["critic.ppo_mini_batch_size=256"] if estimator == "gae" else []
    settings = [f"algorithm.adv_estimator={estimator}", f"algorithm.gamma={GAMMA}", f"algorithm.lam={LAM}", *critic]
    return compose_job(*settings).algorithm


def computed(estimator: str, fields, keys=KEYS, extends_R=None, prompts=5):
    responses = [len(mask) for mask in fields["response_mask"]]
    prompt_R = prompts if isinstance(prompts, list) else [prompts] * len(keys)
    sessions = trajectories(keys, prompt_R, responses, extends_R)
    return session_advantages(as_rows(fields), keys, sessions, algorithm_of(estimator))


def whitened(values: list[float]) -> list[float]:
    """verl's masked_whiten, with the variance of a sample."""
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return [(value - middle) / math.sqrt(variance + 1e-8) for value in values]


def outcome_advantages(estimator: str) -> dict[str, float]:
    """Of each session, which has one score; before a whitening over tokens."""
    groups = defaultdict(list)
    for session in SESSIONS:
        groups[session.split("_")[0]].append(session)
    return {s: outcome_advantage(estimator, s, of_prompt) for of_prompt in groups.values() for s in of_prompt}


def outcome_advantage(estimator: str, session: str, of_prompt: list[str]) -> float:
    """The formula of each estimator.

    Args:
        of_prompt: the sessions of its prompt.
    """
    score, scores = SCORES[session], [SCORES[other] for other in of_prompt]
    match estimator:
        case "grpo" | "grpo_vectorized":
            return (score - mean(scores)) / (stdev(scores) + 1e-6)
        case "rloo" | "rloo_vectorized":
            return score - (sum(scores) - score) / (len(scores) - 1)
        case "opo":
            lengths = [sum(sum(MASKS[row]) for row in SESSIONS[other]) for other in of_prompt]
            return score - sum(map(math.prod, zip(lengths, scores, strict=True))) / sum(lengths)
        case "gpg":
            return len(SCORES) / sum(score != 0 for score in SCORES.values()) * (score - mean(scores))
        case "grpo_passk":
            best, second = sorted(scores, reverse=True)[:2]
            return (best - second) / (stdev(scores) + 1e-6) if score == best else 0.0
        case "reinforce_plus_plus_baseline":
            return score - mean(scores)
    raise AssertionError(f"{estimator}: its formula for sessions is not written out here")


def tokens_in_order() -> list[tuple[str, int, int]]:
    """(session, row, token) of every trained token."""
    return [
        (session, row, token)
        for session, rows in SESSIONS.items()
        for row in rows
        for token, trained in enumerate(MASKS[row])
        if trained
    ]


def token_advantages(estimator: str, fields) -> dict[tuple[int, int], float]:
    """Of every trained token, by row and place, with the formula of each estimator for one trajectory a session."""
    tokens = tokens_in_order()
    if estimator == "gae":
        raw = {}
        for session, of_session in itertools.groupby(tokens, key=lambda token: token[0]):
            next_value = running = 0.0
            for _, row, token in reversed(list(of_session)):
                value = float(fields["values"][row][token])
                reward = SCORES[session] if (row, token) == last_token(session) else 0.0
                running = reward + GAMMA * next_value - value + GAMMA * LAM * running
                next_value = value
                raw[row, token] = running
    elif estimator == "reinforce_plus_plus":
        raw = {}
        for session, of_session in itertools.groupby(tokens, key=lambda token: token[0]):
            for steps, (_, row, token) in enumerate(reversed(list(of_session))):
                raw[row, token] = SCORES[session] * GAMMA**steps
    else:
        outcomes = outcome_advantages(estimator)
        raw = {(row, token): outcomes[session] for session, row, token in tokens}
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        places = [(row, token) for _, row, token in tokens]
        return dict(zip(places, whitened([raw[place] for place in places]), strict=True))
    return raw


def last_token(session: str) -> tuple[int, int]:
    row = SESSIONS[session][-1]
    return row, len(MASKS[row]) - 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_sees_each_session_once_and_its_result_goes_to_all_its_rows(estimator):
    fields = fields_of_rows()
    want = token_advantages(estimator, fields)
    got = computed(estimator, fields)
    rows = got["advantages"].unbind()
    assert [len(row) for row in rows] == [len(mask) for mask in MASKS]
    for (row, token), advantage in want.items():
        assert math.isclose(float(rows[row][token]), advantage, rel_tol=1e-6, abs_tol=1e-9), (row, token)
    assert len({round(value, 9) for value in want.values()}) > 2
    if estimator == "gae":
        raw = [float(r) - float(v) for r, v in zip(got["returns"].unbind()[3], fields["values"][3], strict=True)]
        assert whitened_again(raw, want, row=3)


def whitened_again(raw: list[float], want: dict[tuple[int, int], float], row: int) -> bool:
    """Returns are advantages before they are whitened, plus values: an affine map of what was asked for."""
    trained = [token for token, mask in enumerate(MASKS[row]) if mask]
    (a, b), (x, y) = [raw[token] for token in trained[:2]], [want[row, token] for token in trained[:2]]
    slope = (y - x) / (b - a)
    return all(math.isclose(want[row, t], x + slope * (raw[t] - a), rel_tol=1e-6, abs_tol=1e-9) for t in trained)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sessions_of_one_row_get_what_verl_gives_rows_to_the_last_bit(estimator):
    keys = [f"{prompt}_{session}_0" for prompt in "ab" for session in range(4)]
    masks = [[1] * (1 + place % 3) + [0, 1] for place in range(8)]
    draw = torch.Generator().manual_seed(1)
    fields = {
        "response_mask": [torch.tensor(mask) for mask in masks],
        "rm_scores": [torch.randn(len(mask), generator=draw) for mask in masks],
        "values": [torch.randn(len(mask), generator=draw) for mask in masks],
    }
    fields["token_level_rewards"] = [score - 0.1 for score in fields["rm_scores"]]
    algorithm = algorithm_of(estimator)
    batch = as_rows(fields).to_padded_tensor()
    data = DataProto.from_single_dict({**dict(batch.items())})
    data.non_tensor_batch["uid"] = np.array([uid_of_key(key) for key in keys], dtype=object)
    want = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys,
        adv_estimator=algorithm.adv_estimator,
        gamma=GAMMA,
        lam=LAM,
        norm_adv_by_std_in_grpo=True,
        config=algorithm,
    ).batch
    got = computed(estimator, fields, keys)
    for name in ("advantages", "returns"):
        for row, mask in enumerate(masks):
            assert torch.equal(got[name].unbind()[row], want[name][row, : len(mask)]), (name, row)


def test_an_in_reward_kl_counts_the_tokens_of_all_rows_and_the_reward_once():
    fields = fields_of_rows(kl=True)
    rows = computed("rloo", fields)["advantages"].unbind()
    penalties = [s - t for s, t in zip(fields["rm_scores"], fields["token_level_rewards"], strict=True)]
    score = {s: SCORES[s] - sum(float(penalties[row].sum()) for row in of) for s, of in SESSIONS.items()}
    assert float(rows[0][0]) == pytest.approx(score["a_0"] - score["a_1"])
    assert float(rows[6][0]) == pytest.approx(score["b_1"] - (score["b_0"] + score["b_2"]) / 2)


def test_a_token_that_several_rows_have_is_one_token_of_the_trajectory():
    # Row 1 begins with row 0 and has its response among its own; row 2 begins with row 1, in its prompt.
    keys, prompts, responses, extends_R = (
        ["a_0_0", "a_0_1", "a_0_2", "a_1_0"],
        [4, 4, 9, 4],
        [2, 5, 3, 2],
        [None, 0, 1, None],
    )
    first, other = trajectories(keys, prompts, responses, extends_R)
    assert [places.tolist() for places in first.places] == [[0, 1], [0, 1, 2, 3, 4], [5, 6, 7]]
    assert (first.rows, first.length) == ([0, 1, 2], 8)
    assert (other.rows, other.length) == ([3], 2)
    apart, _ = trajectories(keys, prompts, responses)
    assert apart.length == 10


def test_a_shared_token_is_that_of_the_row_that_trains_it():
    keys, prompts, extends_R = ["a_0_0", "a_0_1", "a_1_0"], [4, 4, 4], [None, 0, None]
    fields = {
        "response_mask": [torch.tensor([0, 1]), torch.tensor([1, 0, 1]), torch.tensor([1])],
        "rm_scores": [torch.tensor([0.0, 9.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5])],
        "values": [torch.tensor([7.0, 0.2]), torch.tensor([0.1, 8.0, 0.3]), torch.tensor([0.4])],
    }
    rows = computed("gae", fields, keys, extends_R, prompts)["returns"].unbind()
    # One trajectory of three trained tokens with the values 0.1, 0.2, 0.3 and a reward of 1 at its end.
    last = 1 - 0.3
    middle = GAMMA * 0.3 - 0.2 + GAMMA * LAM * last
    first = GAMMA * 0.2 - 0.1 + GAMMA * LAM * middle
    assert rows[1].tolist() == pytest.approx([first + 0.1, middle + 0.2, last + 0.3])
    assert float(rows[0][1]) == pytest.approx(middle + 0.2)


def test_an_in_reward_kl_of_tokens_that_rows_share_counts_once_and_is_not_lost():
    keys, extends_R = ["a_0_0", "a_0_1", "a_1_0"], [None, 0, None]
    rewards = [torch.tensor([-0.1, 0.9 - 0.1]), torch.tensor([0.0, 0.0, 1 - 0.4]), torch.tensor([0.5])]
    fields = {
        "response_mask": [torch.tensor([1, 1]), torch.tensor([0, 0, 1]), torch.tensor([1])],
        "rm_scores": [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5])],
        "token_level_rewards": rewards,
    }
    first = float(computed("rloo", fields, keys, extends_R, prompts=[4, 4, 4])["advantages"].unbind()[0][0])
    assert first == pytest.approx(1 - 0.1 - 0.2 - 0.4 - 0.5)


def test_the_reward_is_at_the_end_of_a_trajectory_whose_last_row_begins_an_earlier_one():
    keys, extends_R = ["a_0_0", "a_0_1", "a_1_0"], [1, None, None]
    fields = {
        "response_mask": [torch.tensor([1, 1, 1]), torch.tensor([1, 1]), torch.tensor([1])],
        "rm_scores": [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.5])],
    }
    returns = computed("reinforce_plus_plus", fields, keys, extends_R, prompts=[4, 4, 4])["returns"].unbind()
    assert returns[0].tolist() == pytest.approx([GAMMA**2, GAMMA, 1.0])
    assert returns[1].tolist() == pytest.approx([GAMMA**2, GAMMA])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("first", [2, 0], ids=["its last row", "all its rows"])
def test_a_session_whose_last_response_is_empty_scores_nothing_as_if_it_were_a_token_that_is_not_trained(
    estimator, first
):
    keys, scores = ["a_0_0", "a_0_1", "a_1_0", "a_2_0", "b_0_0", "b_1_0"], [0.7, 0.0, 0.5, 2.0, 1.0, -1.0]
    of_rows, found = [[1] * first, [], [1, 1, 1], [1, 1], [1, 1], [1]], []
    for masks in (of_rows, [mask or [0] for mask in of_rows]):
        fields = {
            "response_mask": [torch.tensor(mask, dtype=torch.int64) for mask in masks],
            "rm_scores": [torch.tensor([0.0] * len(mask)) for mask in masks],
            "values": [torch.linspace(0.1, 0.4, len(mask)) for mask in masks],
        }
        for row, score in zip(fields["rm_scores"], scores, strict=True):
            row[-1:] = score
        found.append([row.tolist() for row in computed(estimator, fields, keys)["advantages"].unbind()])
    empty, untrained = found
    assert [len(row) for row in empty] == [first, 0, 3, 2, 2, 1]
    assert any(any(row) for row in empty)
    for row, advantages in enumerate(empty):
        assert advantages == pytest.approx(untrained[row][: len(advantages)])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("rejected", [[0, 0], [1, 0]], ids=["a whole row", "its last token"])
def test_a_session_keeps_its_reward_where_the_end_of_its_last_row_is_not_trained(estimator, rejected):
    keys = ["a_0_0", "a_0_1", "b_0_0"]
    fields = {
        "response_mask": [torch.tensor([1, 1]), torch.tensor(rejected), torch.tensor([1])],
        "rm_scores": [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.5])],
        "values": [torch.zeros(2), torch.zeros(2), torch.zeros(1)],
    }
    returns = computed(estimator, fields, keys)["returns"].unbind()
    steps = sum(rejected)  # trained tokens after the first row's
    assert float(returns[0][1]) == pytest.approx((GAMMA if estimator != "gae" else GAMMA * LAM) ** steps)


def test_the_penalties_of_a_kl_may_have_another_dtype_than_the_scores():
    fields = fields_of_rows(kl=True)
    want = computed("rloo", fields)["advantages"].unbind()
    fields["rm_scores"] = [score.float() for score in fields["rm_scores"]]
    got = computed("rloo", fields)["advantages"].unbind()
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False)


def test_the_tokens_of_a_row_come_after_those_that_it_begins_with_though_these_are_a_later_rows():
    (found,) = trajectories(["a_0_0", "a_0_1"], [6, 4], [3, 3], [1, None])
    assert found.length == 5  # the last token of the prompt of six is the second response token of the other row
    assert [places.tolist() for places in found.places] == [[2, 3, 4], [0, 1, 2]]


def test_it_makes_no_difference_in_which_order_rows_that_extend_each_other_come():
    # The short row is the later one: its tokens are those that the first row has made already.
    (found,) = trajectories(["a_0_0", "a_0_1"], [4, 4], [5, 2], [1, None])
    assert [places.tolist() for places in found.places] == [[0, 1, 2, 3, 4], [0, 1]]
