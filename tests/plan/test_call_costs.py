"""What is computed of rows, and what it costs: also of random batches, by a slow tally of what an
engine computes."""

import numpy as np
import pytest
from hypothesis import given

from tests.support.call_costs import costs_of
from tests.support.drawn_jobs import MAX_TOKENS
from tests.support.plan_oracles import (
    EXAMPLES,
    MOSTLY_CUT_BY_PLAN,
    OFTEN,
    computed,
    none_is_vacuous,
    planned,
)
from verl_padding.plan import COST_MODELS
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.prefix_tries import PrefixTries


def test_segments_cost_what_an_engine_rounds_them_up_to():
    # Rows of 20 and 17 tokens share 15: of the second, three are computed, and two more than rows
    # alone would have.
    tries = PrefixTries.in_order([20, 17], [0, 1], [0, 15])
    costs = costs_of([20, 17], tries=tries, dp_size=1, token_budget=64, token_multiple=5)
    tokens_DK, used_DK, load_DK = costs.micro_batch_loads([[[0, 1]]])
    assert tokens_DK.tolist() == [[20 + 3]]
    first, longer, before = attention_cost(np.array([20, 19, 14])).tolist()
    assert load_DK.tolist() == [[first + longer - before]]
    assert used_DK.tolist() == [[25]]


@pytest.fixture(scope="module", autouse=True)
def _not_vacuous():
    yield from none_is_vacuous(often=OFTEN, now_and_then=("rows that branch",))


@EXAMPLES
@given(drawn=MOSTLY_CUT_BY_PLAN)
def test_the_figures_are_those_of_the_layout(drawn):
    rows, job = drawn
    plan = planned(rows, job)
    cost_P = np.diff(COST_MODELS[job.cost_model](np.arange(MAX_TOKENS + 1)), prepend=0)
    for name, call in job.calls():
        layout, figures = plan.layouts[name], plan.figures[name]
        tokens, loads_M = -layout.n_pads * job.pad_tokens, []
        for rows_DK in layout.rows_MDK:
            positions_DK = [[computed(rows, job, call, held) for held in ks] for ks in rows_DK]
            tokens += sum(len(held) for ks in positions_DK for held in ks)
            loads_M.append(np.array([[cost_P[held].sum() for held in ks] for ks in positions_DK]))
        mean = sum(load_DK.sum() for load_DK in loads_M) / call.dp_size
        slowest = sum(load_DK.sum(axis=1).max() for load_DK in loads_M)
        assert figures.imbalance == pytest.approx(slowest / mean)
        assert figures.computed_tokens == tokens
        assert figures.sharing_factor == pytest.approx(sum(rows.tokens_R) / tokens)
        if layout.cut_by == "verl":
            assert figures.micro_batches is None
            continue
        n_micro_batches = sum(load_DK.shape[1] for load_DK in loads_M)
        assert figures.micro_batches == n_micro_batches
        micro_slowest = sum(load_DK.max(axis=0).sum() for load_DK in loads_M)
        assert figures.micro_imbalance == pytest.approx(micro_slowest / mean)
        if call.token_budget is not None:
            room = n_micro_batches * call.dp_size * call.token_budget
            assert figures.packing_efficiency == pytest.approx(tokens / room)
