"""Micro-batches with their pads, and their order."""

import pytest

from verl_padding.plan import Job, Rows, Update, plan_batch


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
