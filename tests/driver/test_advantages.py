"""Advantages of whole sessions, from verl's own estimators, against formulas written out, however
they are split."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tests.equivalence.test_estimators_beside_pads import VERLS_LIMITS
from tests.support.estimator_formulas import advantages, returns
from tests.support.losses_on_rows import MODES, nested
from tests.support.plan_oracles import layout_of_local_batches
from tests.support.split_sessions import sessions, split
from tests.support.verl_config import compose_job
from verl_padding.driver.advantages import session_advantages
from verl_padding.pads.loss_weighting import (
    MEAN_OF_TOKENS,
    TOKEN_MODES,
    LossWeighting,
    loss_factors,
)
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import session_of_key, uid_of_key
from verl_padding.prefix_sharing.detection import parent_rows

ESTIMATORS = sorted(set(ADV_ESTIMATOR_REGISTRY) - VERLS_LIMITS.keys())
GAMMA, LAM = 0.9, 0.8
KEYS = ["a_0_0", "a_0_1", "a_1_0", "a_0_10", "a_0_2", "b_0_0", "b_1_0", "b_1_1", "b_2_0"]
"""Two prompts; a session of four rows, which are not in order, one of two, three of one."""


def as_rows(fields):
    return TensorDict(
        {name: nested(values) for name, values in fields.items()},
        batch_size=len(fields["rm_scores"]),
    )


@cache
def algorithm_of(estimator):
    critic = ["critic.ppo_mini_batch_size=256"] if estimator == "gae" else []
    discounts = [f"algorithm.gamma={GAMMA}", f"algorithm.lam={LAM}"]
    return compose_job(f"algorithm.adv_estimator={estimator}", *discounts, *critic).algorithm


def computed(estimator, fields, keys=KEYS, parent_R=None, prompts=5):
    prompt_R = prompts if isinstance(prompts, list) else [prompts] * len(keys)
    masks = fields["response_mask"]
    tokens_R = [prompt + len(mask) for prompt, mask in zip(prompt_R, masks, strict=True)]
    parent_R = parent_R or [None] * len(keys)
    return session_advantages(as_rows(fields), keys, tokens_R, parent_R, algorithm_of(estimator))


def by_verl(estimator, fields, keys):
    """What verl's trainer computes of these rows."""
    algorithm = algorithm_of(estimator)
    rows = as_rows(fields).to_padded_tensor()
    data = DataProto.from_single_dict(
        {"token_level_rewards": rows["rm_scores"], **dict(rows.items())}
    )
    data.non_tensor_batch["uid"] = np.array([uid_of_key(key) for key in keys], dtype=object)
    return compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys,
        adv_estimator=algorithm.adv_estimator,
        gamma=GAMMA,
        lam=LAM,
        norm_adv_by_std_in_grpo=True,
        config=algorithm,
    ).batch


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
    want = by_verl(estimator, fields, keys)
    got = computed(estimator, fields, keys)
    for name in ("advantages", "returns"):
        for row, mask in enumerate(masks):
            assert torch.equal(got[name].unbind()[row], want[name][row, : len(mask)]), (name, row)


def continued(rows, *, said):
    """What the trainer finds, of rows whose agent loop says what it knows or nothing."""
    keys = [row.key for row in rows]
    number = {row.key: place for place, row in enumerate(rows)}
    tries = PrefixTries.from_tokens(
        [np.array(row.prompt + row.response) for row in rows], list(map(session_of_key, keys))
    )
    told = {}
    if said:
        for place, row in enumerate(rows):
            told[place] = (
                None if row.extends is None else number[f"{session_of_key(row.key)}_{row.extends}"]
            )
    found = parent_rows(tries, keys, range(len(keys)), told, {})
    return [found.get(row) for row in range(len(keys))]


def computed_by_action(estimator, rows, rewards, *, said, kl):
    """Advantage and return of each trained token of each row, by session and action."""
    scores = []
    for row in rows:
        score = torch.zeros(len(row.response), dtype=torch.float64)
        score[-1:] = rewards[session_of_key(row.key)]
        scores.append(score)
    fields = {
        "response_mask": [torch.tensor(row.mask, dtype=torch.int64) for row in rows],
        "rm_scores": scores,
        "values": [torch.tensor(row.values, dtype=torch.float64) for row in rows],
    }
    if kl:
        taken = [torch.tensor(row.penalties, dtype=torch.float64) for row in rows]
        fields["token_level_rewards"] = [
            score - of_row for score, of_row in zip(scores, taken, strict=True)
        ]
    keys, prompts = [row.key for row in rows], [len(row.prompt) for row in rows]
    got = computed(estimator, fields, keys, continued(rows, said=said), prompts)
    columns = [got[name].unbind() for name in ("advantages", "returns")]
    return [
        (session_of_key(row.key), action, *(float(column[place][token]) for column in columns))
        for place, row in enumerate(rows)
        for token, action in enumerate(row.actions)
        if action is not None
    ]


@pytest.mark.parametrize("said", [True, False], ids=["its agent loop says how", "nothing is said"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=15)
@given(data=st.data(), kl=st.booleans())
def test_advantages_are_those_of_the_formula_however_a_session_is_split(estimator, said, data, kl):
    drawn = data.draw(sessions(said=said))
    rewards = {session.name: session.reward for session in drawn}
    samples = [session.sample for session in drawn]
    if not kl:
        samples = [replace(each, penalties=[0.0] * len(each.penalties)) for each in samples]
    if (
        estimator == "grpo_vectorized"
    ):  # whose single precision makes noise of scores that are the same
        groups = [{sample.score for sample in samples if sample.uid == uid} for uid in "ab"]
        assume(all(len(scores) > 1 for scores in groups))
    want = {}
    of_formula = (formula(estimator, samples, GAMMA, LAM) for formula in (advantages, returns))
    for session, of_advantage, of_return in zip(drawn, *of_formula, strict=True):
        places = [action for action in session.in_one_row().actions if action is not None]
        want |= {
            (session.name, place): pair
            for place, *pair in zip(places, of_advantage, of_return, strict=True)
        }
    whole = [session.in_one_row() for session in drawn]
    pieces = [row for session in drawn for row in data.draw(split(session, said=said))]
    for rows in (whole, pieces):
        got = computed_by_action(estimator, rows, rewards, said=said, kl=kl)
        assert {(session, action) for session, action, *_ in got} == want.keys()
        for session, action, *pair in got:
            assert pair == pytest.approx(want[session, action], rel=1e-5, abs=1e-6), (
                session,
                action,
            )


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50)
@given(data=st.data(), divides_by_rows=st.booleans())
def test_a_trained_token_weighs_the_same_however_its_session_is_split(mode, data, divides_by_rows):
    drawn = data.draw(sessions(said=True))
    whole = [session.in_one_row() for session in drawn]
    pieces = [row for session in drawn for row in data.draw(split(session, said=True, again=False))]
    want, got = (
        weights_of_tokens(mode, rows, divides_by_rows=divides_by_rows) for rows in (whole, pieces)
    )
    assert got == pytest.approx(want, rel=1e-12)
    if mode not in TOKEN_MODES:  # as verl has rows
        below = sum(any(row.mask) for row in whole) if divides_by_rows else 1
        of_row = {row.key[:-2]: sum(row.mask) if mode == MEAN_OF_TOKENS else 1 for row in whole}
        assert want == {
            place: pytest.approx(1 / of_row[place[0]] / below, rel=1e-12) for place in want
        }


def weights_of_tokens(mode, rows, *, divides_by_rows):
    """What the loss of each trained token is multiplied by, but for a number that is configured."""
    layout = layout_of_local_batches(len(rows), [[tuple(range(len(rows)))]])
    tokens_R = [sum(row.mask) for row in rows]
    weighting = LossWeighting(mode=mode, divides_by_rows=divides_by_rows, by_session=True)
    factor_R = loss_factors(
        layout, [row.key for row in rows], [1.0] * len(rows), tokens_R, weighting
    )
    loss_rows = sum(tokens > 0 for tokens in tokens_R) if divides_by_rows else 1
    below = {"token-mean": sum(tokens_R), "token-sum": 1}.get(mode, loss_rows)
    return {
        (session_of_key(row.key), action): factor
        / below
        / (tokens if mode == MEAN_OF_TOKENS else 1)
        for row, tokens, factor in zip(rows, tokens_R, factor_R, strict=True)
        for action in row.actions
        if action is not None
    }
