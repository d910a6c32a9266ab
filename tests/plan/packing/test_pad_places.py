"""Micro-batches with their pads, and their order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.call_costs import costs_of
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.packing.packing_units import PackingUnits
from verl_padding.plan.packing.pad_places import fit
from verl_padding.plan.packing.sync_per_micro_batch import MicroStepPacker


@pytest.mark.parametrize(
    ("has_pipeline", "tokens"), [(False, [300, 250, 200]), (True, [200, 300, 250])]
)
def test_three_micro_batches_come_in_the_order_that_their_engine_wants(has_pipeline, tokens):
    shape = {
        "dp_size": 1,
        "token_budget": 300,
        "sync_point": "mini_batch",
        "has_pipeline": has_pipeline,
    }
    update = Update(**shape, prompts_per_mini_batch=3)
    job = Job(
        strategy="prompt",
        prompts=3,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={},
        packer="plan",
    )
    lengths = [250, 200, 300]
    layout = plan_batch(Rows.from_keys(["a_0_0", "b_0_0", "c_0_0"], lengths), job).layouts["actor"]
    assert [[lengths[row] for row in held] for held in layout.rows_MDK[0][0]] == [
        [n] for n in tokens
    ]


@settings(max_examples=200)
@given(data=st.data())
def test_any_cut_fits_into_local_batches_that_hold_its_rows(data):
    # Rows as long as the budget leave no room for pads, and full ranks no place for rows.
    n_ranks, multiple = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    tokens = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=30))
    budget = data.draw(st.integers(max(2, *tokens), 40))
    costs = costs_of(tokens, dp_size=n_ranks, token_budget=budget, micro_batch_multiple=multiple)
    packer = MicroStepPacker(costs, PackingUnits.from_rows(costs, range(len(tokens))))
    size = costs.call.min_local_batch_rows(len(tokens)) + multiple * data.draw(st.integers(0, 2))
    rows_DK = fit(costs, packer.cut(), size)
    rows = [row for rows_K in rows_DK for rows in rows_K for row in rows]
    assert sorted(row for row in rows if row < costs.n_rows) == list(range(len(tokens)))
    assert {sum(map(len, rows_K)) for rows_K in rows_DK} == {size}
    assert len({len(rows_K) for rows_K in rows_DK}) == 1
    assert len(rows_DK[0]) % multiple == 0
    assert all(rows for rows_K in rows_DK for rows in rows_K)
    assert costs.micro_batch_loads(rows_DK)[0].max() <= costs.call.token_budget
