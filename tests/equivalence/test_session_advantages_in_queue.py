"""Sessions as samples, through verl's trainer and the real TransferQueue, while pads wait in it."""

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController
from verl.trainer.ppo.v1 import get_trainer_cls

from tests.equivalence.test_advantages import CRITIC, VERLS_LIMITS
from tests.support.rows_in_queue import put_columns, put_rows, read_columns
from tests.support.sessions_that_grow import grown_sessions, put_grown_sessions
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.job.calls import ACTOR, LOG_PROB, REF, VALUES
from verl_padding.job.calls import CRITIC as CRITIC_CALL
from verl_padding.pads.upsampling import strip
from verl_padding.plan.row_keys import session_of_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

TURNS = [3, 1, 2, 1, 4, 1]
"""Rows of each session; two sessions of each of three prompts."""
COLUMNS = ("old_log_probs", "ref_log_prob", "values")


def computed(advantages: str, estimator: str, *overrides: str) -> tuple[dict[str, list[float]], dict]:
    """Advantages of each row by its key, and the metrics."""
    discount = ("algorithm.gamma=0.9", "algorithm.lam=0.8")
    settings = (f"algorithm.adv_estimator={estimator}", f"padding.advantages={advantages}", *discount, *overrides)
    trainer = padded_trainer(*settings, *(CRITIC if estimator == "gae" else []))
    trainer._dp_sizes = lambda: dict.fromkeys((ACTOR, CRITIC_CALL, LOG_PROB, REF, VALUES), 2)
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10)
    rows, metrics = grown_sessions(TURNS, prompts=3), {}
    draw = torch.Generator().manual_seed(0)
    rewards = {session: float(torch.randn((), generator=draw)) for session in sorted(set(map(session_of_key, rows)))}
    torch.manual_seed(0)  # of whatever else rows have
    batch = put_grown_sessions(rows)
    responses = [len(response) for _, response in rows.values()]
    scores = [torch.zeros(response) for response in responses]
    for key, score in zip(rows, scores, strict=True):
        score[-1] = rewards[session_of_key(key)]
    columns = {name: [torch.randn(n, generator=draw) for n in responses] for name in COLUMNS}
    put_columns(batch, rm_scores=scores, **columns)
    batch = trainer._balance_batch(batch, {})
    assert trainer._padded_batch.plan.n_pads > 0
    trainer._compute_advantage(batch, metrics)
    strip(trainer._padded_batch.pads)
    (found,) = read_columns(batch, "advantages")
    return dict(zip(batch.keys, [row.tolist() for row in found], strict=True)), metrics


@pytest.mark.parametrize("estimator", sorted(set(ADV_ESTIMATOR_REGISTRY) - VERLS_LIMITS.keys()))
def test_all_rows_of_a_session_have_one_outcome_and_rows_as_samples_differ(estimator):
    by_row, _ = computed("row", estimator)
    by_session, _ = computed("session", estimator)
    pairs = [zip(row, by_row[key], strict=True) for key, row in by_session.items()]
    differ = max(abs(a - b) for pair in pairs for a, b in pair)
    # verl takes sessions for samples itself, or weighs samples by their tokens, however these are shared out to rows.
    assert differ < 1e-6 if estimator in ("grpo", "opo") else differ > 0.05
    if estimator not in ("gae", "reinforce_plus_plus"):  # whose advantages differ from token to token
        for session in {session_of_key(key) for key in by_session}:
            rows = [row for key, row in by_session.items() if session_of_key(key) == session]
            assert len({round(value, 5) for row in rows for value in row}) == 1


@pytest.mark.parametrize(("said", "actions"), [(None, 4), ([None, None, 0, 2], 2), ([None, None, None, None], 4)])
def test_two_equal_turns_are_two_actions_unless_the_agent_loop_says_that_one_continues_the_other(said, actions):
    found = returns_of(["a_0_0", "a_0_1", "a_0_2", "a_0_3"], [([1], [2]), ([3], [4]), ([1], [2]), ([1], [2])], said)
    want = [0.9 ** (actions - 1 - action) for action in range(actions)]
    assert found == pytest.approx(want if actions == 4 else [want[0], want[1], want[0], want[0]])


def returns_of(keys, rows, said) -> list[float]:
    """Of all tokens, for a reward of 1."""
    trainer = padded_trainer(
        "algorithm.adv_estimator=reinforce_plus_plus", "padding.advantages=session", "algorithm.gamma=0.9"
    )
    extra = [{} if said is None else {"extends": extends} for extends in said or keys]
    scores = [torch.tensor([0.0] * (len(response) - 1) + [1.0]) for _, response in rows]
    before = [torch.zeros(len(response)) for _, response in rows]
    batch = put_grown_sessions(
        dict(zip(keys, rows, strict=True)), extra_fields=extra, rm_scores=scores, old_log_probs=before
    )
    trainer._compute_advantage(batch, {})
    (returns,) = read_columns(batch, "returns")
    return torch.cat(returns).tolist()


def outcomes_of(trainer, keys, masks, rewards, compute) -> list[list[float]]:
    """Advantages, which are the returns, too, of rows with masks, and a reward at the end of each."""
    fields = {
        "rm_scores": [torch.tensor([0.0] * (len(m) - 1) + [r]) for r, m in zip(rewards, masks, strict=True)],
        "old_log_probs": [torch.zeros(len(mask)) for mask in masks],
        "response_mask": [torch.tensor(mask) for mask in masks],
    }
    batch = put_rows([(2, len(mask)) for mask in masks], keys, **fields)
    compute(trainer, batch, {})
    advantages, returns = ([row.tolist() for row in column] for column in read_columns(batch, "advantages", "returns"))
    assert returns == advantages
    return advantages


def test_verl_takes_no_advantage_from_a_session_whose_last_row_is_not_trained_and_we_do():
    keys = ["a_0_0", "a_0_1", "a_1_0", "a_2_0", "a_2_1", "b_0_0", "b_0_1", "b_1_0"]
    masks = [[1, 1], [0, 0], [1], [0], [0, 0], [1], [1, 1], [1]]
    rewards = {"a_0": 1.0, "a_1": 0.0, "a_2": -1.0, "b_0": 2.0, "b_1": 0.0}
    rewards_R, trainer = [rewards[session_of_key(key)] for key in keys], padded_trainer("algorithm.adv_estimator=grpo")
    verls, ours = (
        outcomes_of(trainer, keys, masks, rewards_R, kind._compute_advantage)
        for kind in (get_trainer_cls("sync"), type(trainer))
    )
    assert verls[0] == [0, 0], "verl looks for a trained token now: repair_untrained_ends may go"
    assert ours[0] == pytest.approx([1 / (1 + 1e-6)] * 2)
    assert ours[1:] == verls[1:]
    assert ours[2][0] != ours[5][0] == ours[6][0] != 0


@pytest.mark.parametrize(
    ("rewards", "masks"),
    [
        pytest.param([0.6, 1.0, 0.7], [[1, 1], [0, 0], [1]], id="penalties that differ by row"),
        pytest.param([0.0, 1.0, 0.5], [[1], [0], [1]], id="scores that differ by row"),
    ],
)
def test_a_session_whose_last_row_is_not_trained_has_the_reward_that_verl_compares(rewards, masks):
    """verl's reward of a session is that of its last row: the group's mean stays in the middle of its advantages."""
    trainer = padded_trainer("algorithm.adv_estimator=grpo")
    found = outcomes_of(trainer, ["p_0_0", "p_0_1", "p_1_0"], masks, rewards, type(trainer)._compute_advantage)
    half = 0.5**0.5  # (x - mean) / std of two, with Bessel's correction
    assert found[0] == pytest.approx([half] * len(masks[0]), abs=1e-4)
    assert found[2] == pytest.approx([-half], abs=1e-4)


def test_an_in_reward_kl_reaches_sessions_and_moves_its_controller_once():
    overrides = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=64")
    (by_row, row_metrics), (by_session, metrics) = (computed(kind, "rloo", *overrides) for kind in ("row", "session"))
    assert by_row != by_session
    assert metrics == row_metrics
