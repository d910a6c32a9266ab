"""How strategies cut batches whose mini-batches are known."""

import pytest

from verl_padding.plan import Job, Rows, Update, plan_batch


def plan_of(strategy, n_rows, dp_size=1, *, prompts=24, **mini_batches):
    """Of rows that are a prompt each."""
    rows = Rows.from_keys([f"p{row}_0_0" for row in range(n_rows)], [10] * n_rows)
    updates = {
        name: Update(dp_size=dp_size, prompts_per_mini_batch=size)
        for name, size in mini_batches.items()
    }
    shape = {"prompts": prompts, "sessions_per_prompt": 1, "row_multiple": dp_size}
    return plan_batch(rows, Job(strategy=strategy, updates=updates, inference={}, **shape))


def test_lcm_spreads_the_rows_over_as_many_steps_as_verl_takes():
    plan = plan_of("lcm", 25, 4, actor=8, critic=12)
    assert plan.layouts["actor"].real_rows_M == (5, 4, 4, 4, 4, 4)
    assert plan.layouts["critic"].real_rows_M == (7, 6, 6, 6)
    assert plan.n_pads == 48 - 25


@pytest.mark.parametrize("strategy", ["prompt", "rows"])
def test_fewer_steps_than_configured_are_told_with_their_numbers(strategy):
    (warning,) = plan_of(strategy, 2, actor=8).warnings
    assert "actor" in warning
    assert "2 of 3" in warning
    assert not plan_of(strategy, 3, actor=8).warnings
