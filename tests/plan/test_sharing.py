"""What rows share: plans beside those without it, and beside every cut of a few chains."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from benchmarks.one_gpu.rows import nested
from tests.support.drawn_jobs import batches, jobs, tries_of_chains
from tests.support.plan_oracles import used
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.calls import SyncPoint
from verl_padding.plan.planner import costs_of, reuses_layout_of
from verl_padding.prefix_sharing.engine import find_trie


@settings(max_examples=40)
@given(rows=batches(known="tries"), job=jobs(pass_cut_as_update=True, sharing="on"))
def test_with_nothing_to_share_the_plan_is_that_without_sharing(rows, job):
    off = replace(job, sharing="off")
    alone = replace(rows, tries=tries_of_chains(rows.tokens_R, range(len(rows))))
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
    tokens = [10, 20, 30, 40] * 16
    tries = tries_of_chains(tokens, [number // 4 for number in range(64)])
    call = {"dp_size": 2, "token_budget": 64, "sync_point": sync_point}
    job = Job(
        strategy="prompt",
        prompts=8,
        sessions_per_prompt=2,
        updates={"actor": Update(**call, prompts_per_mini_batch=4)},
        inference={"log_prob": Pass(**call)},
        packer="plan",
        sharing="on",
    )
    plan = plan_batch(Rows.from_keys(keys, tokens, tries), job)
    assert plan.n_pads == 0
    for figures in plan.figures.values():
        assert figures.sharing_factor == 100 / 40
        assert figures.micro_imbalance == 1


def times(rows, job):
    """What each call takes that has a layout of its own, by the plan's own cost."""
    layouts = plan_batch(rows, job).layouts
    own = {name: call for name, call in job.calls() if reuses_layout_of(job, call) is None}
    return {
        name: sum(map(costs_of(rows, job, call).step_time, layouts[name].rows_MDK))
        for name, call in own.items()
    }


@settings(max_examples=40)
@given(
    rows=batches(max_prompts=4, max_rows=6),
    job=jobs(pass_cut_as_update=True, sharing="on"),
)
def test_no_call_takes_longer_than_without_sharing(rows, job):
    less = replace(job, may_branch=False), replace(job, sharing="off")
    branches, whole, off = (times(rows, each) for each in (job, *less))
    tries = rows.tries and replace(rows.tries, whole_rows_only=True)
    assert whole == times(replace(rows, tries=tries), job)
    for name, time in off.items():
        assert max(branches[name], whole[name]) <= time


@settings(max_examples=50)
@given(
    rows=batches(max_prompts=2, max_sessions=5, max_rows=6, known="tries", max_tokens=60),
    job=jobs(pass_cut_as_update=True, sharing="on"),
    least=st.sampled_from([1, 128]),
    multiple=st.sampled_from([1, 8]),
)
def test_no_micro_batch_takes_more_than_the_budget_where_many_rows_branch(
    rows, job, least, multiple
):
    bounds = {"min_branch_tokens": least, "token_multiple": multiple}
    calls = {
        name: {each: replace(call, **bounds) for each, call in of_kind.items()}
        for name, of_kind in (("updates", job.updates), ("inference", job.inference))
    }
    job = replace(job, **calls)
    layouts = plan_batch(rows, job).layouts
    for name, call in job.calls():
        if call.token_budget is not None:
            for held in micro_batches(layouts[name]):
                assert used(rows, job, call, held) <= call.token_budget


def micro_batches(layout):
    return [held for step in layout.rows_MDK for of_rank in step for held in of_rank]


@settings(max_examples=50)
@given(
    rows=batches(max_prompts=4, max_rows=6, known="tries"),
    job=jobs(pass_cut_as_update=True, sharing="on"),
    data=st.data(),
)
def test_computed_tokens_are_those_that_workers_compute(rows, job, data):
    zero_advantage = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
    job = replace(
        job,
        may_branch=data.draw(st.booleans()),
        updates={
            name: replace(call, drops_zero_advantage=True) for name, call in job.updates.items()
        },
    )
    plan = plan_batch(replace(rows, zero_advantage=tuple(zero_advantage)), job)
    number = {token: n for n, token in enumerate(sorted({t for text in rows.text_R for t in text}))}
    ids_R = [torch.tensor([number[token] for token in text]) for text in rows.text_R]

    def computed(held):
        """By the worker's own trie of a micro-batch, which compares the rows' tokens."""
        data = TensorDict({"input_ids": nested([ids_R[row] for row in held])}, len(held))
        position_R = rows.tries.dfs_position_R[list(held)].tolist()
        return find_trie(data, may_branch=job.may_branch, position_R=position_R).tokens

    for name, call in job.calls():
        if call.token_budget is not None:
            held_B = micro_batches(plan.layouts[name])
            real_B = [[row for row in held if row < len(rows)] for held in held_B]
            assert plan.figures[name].computed_tokens == sum(map(computed, filter(None, real_B)))
