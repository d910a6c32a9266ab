"""What rows weigh: the factors of random mini-batches against the formula, and weights that are
refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.losses_on_rows import MODES
from tests.support.plan_oracles import layout_of_local_batches
from verl_padding.errors import PaddingDataError
from verl_padding.pads.loss_weighting import TOKEN_MODES, LossWeighting, loss_factors
from verl_padding.plan.row_keys import session_of_key


@st.composite
def weighed_batches(draw):
    """Two mini-batches on two ranks, keys, weights and tokens; no mini-batch weighs nothing."""
    n_rows = draw(st.integers(2, 14))
    cut = draw(st.integers(1, n_rows - 1))
    halves = [list(range(cut)), list(range(cut, n_rows))]
    size = max(-(-len(half) // 2) for half in halves)
    pads = iter(range(n_rows, 10 * n_rows + 8))
    local_batches = []
    for half in halves:
        filled = half + [next(pads) for _ in range(2 * size - len(half))]
        local_batches.append((tuple(filled[:size]), tuple(filled[size:])))
    keys = [f"p{row // 4}_{draw(st.integers(0, 1))}_{row}" for row in range(n_rows)]
    weights = draw(
        st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.5]), min_size=n_rows, max_size=n_rows)
    )
    tokens = draw(st.lists(st.integers(0, 9), min_size=n_rows, max_size=n_rows))
    for half in halves:
        trained = next((row for row in half if tokens[row]), half[0])
        weights[trained] = weights[trained] or 0.5
    return layout_of_local_batches(n_rows, local_batches), halves, keys, weights, tokens


@settings(max_examples=200)
@given(
    batch=weighed_batches(),
    mode=st.sampled_from(MODES),
    divides_by_rows=st.booleans(),
    by_session=st.booleans(),
)
def test_a_factor_turns_verls_denominator_into_that_of_the_weights(
    batch, mode, divides_by_rows, by_session
):
    layout, halves, keys, weights, tokens = batch
    weighting = LossWeighting(mode=mode, divides_by_rows=divides_by_rows, by_session=by_session)
    factor_R = loss_factors(layout, keys, weights, tokens, weighting)
    for rows in halves:
        shares, counts = {}, {}
        for row in rows:
            mates = [
                mate for mate in rows if session_of_key(keys[mate]) == session_of_key(keys[row])
            ]
            of_session = sum(tokens[mate] for mate in mates)
            part = tokens[row] / of_session if of_session else 0.0
            shares[row] = weights[row]
            counts[row] = weights[row] * (tokens[row] > 0)
            if by_session:
                counts[row] *= part
                if mode in TOKEN_MODES:
                    shares[row] = weights[row] / of_session if tokens[row] else 0.0
                elif mode == "seq-mean-token-mean":
                    shares[row] = counts[row]
        if mode == "token-sum" or (mode not in TOKEN_MODES and not divides_by_rows):
            verls = ours = 1.0
        elif mode == "token-mean":
            verls, ours = (
                sum(tokens[row] for row in rows),
                sum(shares[row] * tokens[row] for row in rows),
            )
        else:
            verls, ours = sum(tokens[row] > 0 for row in rows), sum(counts.values())
        for row in rows:
            want = shares[row] / ours * verls if ours else 0.0
            assert math.isclose(factor_R[row], want, rel_tol=1e-12, abs_tol=0.0)


@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_whose_tokens_all_weigh_nothing_is_refused(mode, by_session):
    layout = layout_of_local_batches(2, [[(0,), (1,)]])
    weighting = LossWeighting(mode=mode, by_session=by_session)
    with pytest.raises(
        PaddingDataError,
        match=r"^row 'p_1_0': loss_weight=0.0, as in all rows of mini-batch 0 .*\(1 row\)",
    ):
        loss_factors(layout, ["p_0_0", "p_1_0"], [1.0, 0.0], [0, 5], weighting)
