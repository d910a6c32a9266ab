"""Single cases of the planner: figures that are known, and everything it refuses."""

from dataclasses import replace

import pytest

from tests.plan.test_strategies import JOB
from verl_padding.plan import (
    BatchPlan,
    Job,
    Layout,
    Pass,
    PlanError,
    Rows,
    Update,
    plan_batch,
)
from verl_padding.plan.planner import reuses_layout_of


def batch(tokens):
    """A prompt for each row."""
    return Rows.from_keys([f"p{i}_0_0" for i in range(len(tokens))], tokens)


def job_of(
    strategy="prompt", *, prompts=1, sessions=1, inference=None, packer="verl", seed=0, **updates
):
    return Job(
        strategy=strategy,
        prompts=prompts,
        sessions_per_prompt=sessions,
        updates=updates,
        inference=inference or {},
        packer=packer,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("padded_to", "taken"), [("row", "actor"), ("micro_batch", "actor"), ("local_batch", None)]
)
def test_a_pass_takes_no_micro_batches_in_which_its_rows_would_be_longer(padded_to, taken):
    call = {"dp_size": 2, "token_budget": 100, "padded_to": padded_to}
    inference = {"log_prob": Pass(**call, as_update="actor")}
    actor = Update(**call, prompts_per_mini_batch=1)
    job = job_of("rows", prompts=2, inference=inference, packer="plan", actor=actor)
    assert reuses_layout_of(job, inference["log_prob"]) == taken


def test_shuffle_changes_the_mini_batches_with_the_seed_and_nothing_else():
    def mini_batches(seed, shuffle):
        job = job_of(
            prompts=16, seed=seed, a=Update(dp_size=1, prompts_per_mini_batch=4, shuffle=shuffle)
        )
        return plan_batch(batch([10] * 16), job).layouts["a"].local_batches

    assert mini_batches(1, False) == mini_batches(2, False)
    assert mini_batches(1, True) == mini_batches(1, True)
    assert mini_batches(1, True) != mini_batches(2, True)


def test_rows_whose_costs_no_integer_holds_are_refused():
    rows = Rows.from_keys([f"a_0_{row}" for row in range(512)], [3] * 511 + [2**26])
    call = Pass(dp_size=1, token_budget=2**26)
    with pytest.raises(PlanError, match=r"row 'a_0_511' has 67108864 tokens"):
        plan_batch(rows, job_of("rows", inference={"ref": call}))


def test_a_batch_has_as_many_pads_as_the_call_that_needs_most():
    # Of three rows; numbers from 3 on are pads.
    actor = Layout(n_rows=3, rows_MDK=((((0, 2), (3,)), ((1,), (4, 5))),))
    ref = Layout(n_rows=3, rows_MDK=((((0, 2),), ((1, 3),)),))
    plan = BatchPlan(job=JOB, layouts={"actor": actor, "ref": ref}, figures={})
    assert plan.n_pads == 3
    assert replace(plan, layouts={}).n_pads == 0
