"""The figures of plans of random batches, against a slow tally of what an engine computes."""

import numpy as np
import pytest
from hypothesis import given

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


@pytest.fixture(scope="module", autouse=True)
def _not_vacuous():
    yield from none_is_vacuous(often=OFTEN, now_and_then=("rows that part",))


@EXAMPLES
@given(drawn=MOSTLY_CUT_BY_PLAN)
def test_the_figures_are_those_of_the_layout(drawn):
    rows, job = drawn
    plan = planned(rows, job)
    for name, call in job.calls():
        layout, figures = plan.layouts[name], plan.figures[name]
        tokens_R = np.array([*rows.tokens_R, *[job.pad_tokens] * layout.n_pads])
        cost_R = COST_MODELS[job.cost_model](tokens_R)
        cost_P = np.diff(COST_MODELS[job.cost_model](np.arange(MAX_TOKENS + 1)), prepend=0)
        if not layout.is_cut:
            load_MD = [
                [sum(cost_R[min(row, len(rows))] for row in local_batch) for local_batch in ranks]
                for ranks in layout.local_batches
            ]
            slowest = sum(map(max, load_MD))
            assert figures.imbalance == pytest.approx(slowest / (cost_R.sum() / call.dp_size))
            assert figures.micro_batches is None
            continue
        slowest = micro_slowest = micro_batches = cost = 0
        computed_tokens = 0
        for mini_batch in range(layout.n_mini_batches):
            held_DK = [layout.rows_MDK[mini_batch][rank] for rank in range(layout.dp_size)]
            computed_tokens -= (
                sum(row >= len(rows) for of_D in held_DK for of in of_D for row in of)
                * job.pad_tokens
            )
            positions_DK = [
                [computed(rows, job, call, held) for held in held_K] for held_K in held_DK
            ]
            load_DK = np.array(
                [[cost_P[positions].sum() for positions in of_rank] for of_rank in positions_DK]
            )
            computed_tokens += sum(
                len(positions) for of_rank in positions_DK for positions in of_rank
            )
            slowest += load_DK.sum(axis=1).max()
            micro_slowest += load_DK.max(axis=0).sum()
            cost += load_DK.sum()
            micro_batches += load_DK.shape[1]
        mean = cost / call.dp_size
        assert figures.imbalance == pytest.approx(slowest / mean)
        assert figures.micro_batches == micro_batches
        assert figures.micro_imbalance == pytest.approx(micro_slowest / mean)
        assert figures.computed_tokens == computed_tokens
        assert figures.sharing_factor == pytest.approx(sum(rows.tokens_R) / computed_tokens)
        if call.token_budget is not None:
            room = micro_batches * call.dp_size * call.token_budget
            assert figures.packing_efficiency == pytest.approx(computed_tokens / room)
