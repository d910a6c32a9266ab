"""How a strategy cuts a batch whose mini-batches are known, and what a job is refused for."""

from dataclasses import replace

import pytest

from verl_padding.plan import Job, PlanError, Rows, Update, plan_batch

JOB = Job(strategy="rows", prompts=1, sessions_per_prompt=1, updates={}, inference={})


def test_lcm_spreads_the_rows_over_as_many_steps_as_verl_takes():
    rows = Rows.from_keys([f"p{row}_0_0" for row in range(25)], [10] * 25)
    updates = {
        name: Update(dp_size=4, prompts_per_mini_batch=size)
        for name, size in (("actor", 8), ("critic", 12))
    }
    shape = {"prompts": 24, "sessions_per_prompt": 1, "row_multiple": 4}
    plan = plan_batch(rows, Job(strategy="lcm", updates=updates, inference={}, **shape))
    assert plan.layouts["actor"].real_rows_M == (5, 4, 4, 4, 4, 4)
    assert plan.layouts["critic"].real_rows_M == (7, 6, 6, 6)
    assert plan.n_pads == 48 - 25


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with padding.packer='verl'.*packer='plan'"):
        replace(JOB, sharing="on")
