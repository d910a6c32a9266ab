"""A session may be split into rows in any way: advantages, returns and weights of what it trains are the same."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.driver.test_session_advantages import ESTIMATORS, GAMMA, LAM, algorithm_of
from tests.support import estimator_formulas
from tests.support.losses_on_rows import MODES, nested
from tests.support.split_sessions import Row, sessions, split
from verl_padding.driver.advantages import session_advantages, trajectory_places
from verl_padding.pads.lineage import Inputs, continued, extensions
from verl_padding.pads.loss_weighting import MEAN_OF_TOKENS, TOKEN_MODES, LossWeighting, loss_factors
from verl_padding.plan import Layout
from verl_padding.plan.row_keys import session_of_key


def continued_rows(rows: list[Row], *, said: bool) -> list[int | None]:
    """What the trainer finds, of rows whose agent loop says what it knows or nothing."""
    keys = [row.key for row in rows]
    number = {row.key: place for place, row in enumerate(rows)}
    inputs = Inputs(TensorDict({"input_ids": nested(torch.tensor(r.prompt + r.response) for r in rows)}, len(rows)))
    told = {}
    if said:
        for place, row in enumerate(rows):
            told[place] = None if row.extends is None else number[f"{session_of_key(row.key)}_{row.extends}"]
    tokens_R = [len(row.prompt) + len(row.response) for row in rows]
    return continued(keys, tokens_R, extensions(inputs, keys), told)


def computed(estimator: str, rows: list[Row], rewards: dict[str, float], *, said: bool, kl: bool):
    """Advantage and return of each trained token of each row, by session and action."""
    scores = []
    for row in rows:
        score = torch.zeros(len(row.response), dtype=torch.float64)
        score[-1:] = rewards[session_of_key(row.key)]
        scores.append(score)
    fields = {
        "response_mask": nested(torch.tensor(row.mask, dtype=torch.int64) for row in rows),
        "rm_scores": nested(scores),
        "values": nested(torch.tensor(row.values, dtype=torch.float64) for row in rows),
    }
    if kl:
        taken = [torch.tensor(row.penalties, dtype=torch.float64) for row in rows]
        fields["token_level_rewards"] = nested(score - of_row for score, of_row in zip(scores, taken, strict=True))
    keys = [row.key for row in rows]
    prompts, responses = [len(row.prompt) for row in rows], [len(row.response) for row in rows]
    places_R = trajectory_places(keys, prompts, responses, continued_rows(rows, said=said))
    got = session_advantages(TensorDict(fields, len(rows)), keys, places_R, algorithm_of(estimator))
    columns = [got[name].unbind() for name in ("advantages", "returns")]
    return [
        (session_of_key(row.key), action, *(float(column[place][token]) for column in columns))
        for place, row in enumerate(rows)
        for token, action in enumerate(row.actions)
        if action is not None
    ]


@pytest.mark.parametrize("said", [True, False], ids=["its agent loop says how", "nothing is said"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=25)
@given(data=st.data(), kl=st.booleans())
def test_the_advantages_of_a_sessions_actions_are_those_of_its_formula_however_it_is_split(estimator, said, data, kl):
    drawn = data.draw(sessions(said=said))
    rewards = {session.name: session.reward for session in drawn}
    samples = [session.sample for session in drawn]
    if not kl:
        samples = [
            estimator_formulas.Sample(sample.uid, sample.reward, sample.values, [0.0] * len(sample.values))
            for sample in samples
        ]
    if estimator == "grpo_vectorized":  # whose single precision makes noise of scores that are the same
        groups = [{sample.score for sample in samples if sample.uid == uid} for uid in "ab"]
        assume(all(len(scores) > 1 for scores in groups))
    want = {}
    advantages = estimator_formulas.advantages(estimator, samples, GAMMA, LAM)
    returns = estimator_formulas.returns(estimator, samples, GAMMA, LAM)
    for session, of_advantage, of_return in zip(drawn, advantages, returns, strict=True):
        places = [action for action in session.in_one_row().actions if action is not None]
        want |= {(session.name, place): pair for place, *pair in zip(places, of_advantage, of_return, strict=True)}
    whole = [session.in_one_row() for session in drawn]
    pieces = [row for session in drawn for row in data.draw(split(session, said=said))]
    for rows in (whole, pieces):
        got = computed(estimator, rows, rewards, said=said, kl=kl)
        assert {(session, action) for session, action, *_ in got} == want.keys()
        for session, action, *pair in got:
            assert pair == pytest.approx(want[session, action], rel=1e-5, abs=1e-6), (session, action)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=100)
@given(data=st.data(), by_rows=st.booleans())
def test_a_trained_token_weighs_the_same_however_its_session_is_split(mode, data, by_rows):
    drawn = data.draw(sessions(said=True))
    whole = [session.in_one_row() for session in drawn]
    pieces = [row for session in drawn for row in data.draw(split(session, said=True, again=False))]
    want, got = (weights_of_tokens(mode, rows, by_rows=by_rows) for rows in (whole, pieces))
    assert got == pytest.approx(want, rel=1e-12)
    if mode not in TOKEN_MODES:  # as verl has rows
        below = len(drawn) if by_rows else 1
        of_row = {row.key[:-2]: sum(row.mask) if mode == MEAN_OF_TOKENS else 1 for row in whole}
        assert want == {place: pytest.approx(1 / of_row[place[0]] / below, rel=1e-12) for place in want}


def weights_of_tokens(mode: str, rows: list[Row], *, by_rows: bool) -> dict[tuple[str, tuple[int, int]], float]:
    """What the loss of each trained token is multiplied by, but for a number that is configured."""
    layout = Layout(n_rows=len(rows), cells=((tuple(range(len(rows))),),))
    tokens_R = [sum(row.mask) for row in rows]
    weighting = LossWeighting(call="actor", mode=mode, by_rows=by_rows, by_session=True)
    factor_R = loss_factors(layout, [row.key for row in rows], [1.0] * len(rows), tokens_R, weighting)
    below = {"token-mean": sum(tokens_R), "token-sum": 1}.get(mode, len(rows) if by_rows else 1)
    return {
        (session_of_key(row.key), action): factor / below / (tokens if mode == MEAN_OF_TOKENS else 1)
        for row, tokens, factor in zip(rows, tokens_R, factor_R, strict=True)
        for action in row.actions
        if action is not None
    }
