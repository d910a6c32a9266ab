"""What rows share: plans beside those without it, and beside every cut of a few chains."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings

from tests.support.drawn_jobs import batches, forest_of_chains, jobs
from verl_padding.plan import Job, Pass, PlanError, Rows, Update, plan_batch
from verl_padding.plan.calls import SyncPoint
from verl_padding.plan.forest import Forest
from verl_padding.plan.mini_batch_costs import micro_batches_of
from verl_padding.plan.planner import costs_of, reuses_layout_of

BUDGET = 64


def job_of(sync_point: SyncPoint = "micro_batch", mini: int = 4) -> Job:
    call = {"dp_size": 2, "token_budget": BUDGET, "sync_point": sync_point}
    return Job(
        strategy="prompt",
        prompts=8,
        sessions_per_prompt=2,
        updates={"actor": Update(**call, prompts_per_mini_batch=mini)},
        inference={"log_prob": Pass(**call)},
        packer="plan",
        sharing="on",
    )


def chained(keys: Sequence[str], tokens: Sequence[int], chain_R: Sequence[int]) -> Rows:
    """Rows of which the longer ones of a chain begin with the shorter ones."""
    return Rows.from_keys(keys, tokens, forest_of_chains(tokens, chain_R))


@settings(max_examples=60)
@given(rows=batches(known="forest"), job=jobs(pass_cut_as_update=True, sharing="on"))
def test_with_nothing_to_share_the_plan_is_that_without_sharing(rows, job):
    off = replace(job, sharing="off")
    alone = replace(rows, forest=forest_of_chains(rows.tokens_R, range(len(rows))))
    unknown = Rows.from_keys(rows.key_R, rows.tokens_R)
    want = plan_batch(unknown, off)
    for of_rows, each in [(alone, job), (unknown, job), (rows, off)]:
        plan = plan_batch(of_rows, each)
        assert plan.layouts == want.layouts
        assert plan.figures == want.figures
        assert {figures.sharing_factor for figures in plan.figures.values()} == {1.0}


@pytest.mark.parametrize("sync_point", get_args(SyncPoint))
def test_chains_stay_whole_and_few_pads_are_needed_if_sessions_are_alike(sync_point):
    keys = [f"p{number // 8}_{number // 4 % 2}_{number % 4}" for number in range(64)]
    rows = chained(keys, [10, 20, 30, 40] * 16, [number // 4 for number in range(64)])
    plan = plan_batch(rows, job_of(sync_point))
    for figures in plan.figures.values():
        assert figures.sharing_factor == 100 / 40
        assert figures.pads == 0
        assert figures.micro_over_lower_bound == 1


"""Cost and tokens of each rank in a micro-step."""


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with packer='verl'.*packer='plan'"):
        replace(job_of(), packer="verl")


def times(rows: Rows, job: Job) -> dict[str, int]:
    """What each call takes that has a layout of its own, by the plan's own cost."""
    layouts = plan_batch(rows, job).layouts
    own = {name: call for name, call in job.calls() if reuses_layout_of(job, call) is None}
    return {
        name: sum(map(costs_of(rows, job, call).step_time, micro_batches_of(layouts[name])))
        for name, call in own.items()
    }


@settings(max_examples=80)
@given(rows=batches(max_prompts=4, max_rows=6), job=jobs(pass_cut_as_update=True, sharing="on"))
def test_no_call_takes_longer_than_without_sharing(rows, job):
    less = replace(job, may_branch=False), replace(job, sharing="off")
    branches, whole, off = (times(rows, each) for each in (job, *less))
    assert whole == times(replace(rows, forest=rows.forest and rows.forest.whole_beginnings()), job)
    for name, time in off.items():
        assert max(branches[name], whole[name]) <= time


def test_rows_that_part_take_no_less_of_the_budget_than_is_said():
    # 64 rollouts of ten tokens, of one prompt of a hundred: all fit into one micro-batch.
    keys = [f"a_{session}_0" for session in range(64)]
    forest = Forest.in_order([110] * 64, range(64), [0, *[100] * 63])
    rows = Rows.from_keys(keys, [110] * 64, forest=forest)
    for min_branch_tokens, most in ((0, 64), (128, 16)):
        update = Update(
            dp_size=1,
            token_budget=2048,
            prompts_per_mini_batch=1,
            min_branch_tokens=min_branch_tokens,
        )
        job = Job(
            strategy="prompt",
            prompts=1,
            sessions_per_prompt=64,
            updates={"actor": update},
            inference={},
            packer="plan",
            sharing="on",
        )
        layout = plan_batch(rows, job).layouts["actor"]
        assert max(len(held) for held in layout.micro_batches(0, 0)) == most
