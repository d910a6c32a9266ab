"""What rows share: plans beside those without it, and beside every cut of a few chains."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.drawn_jobs import batches, forest_of_chains, jobs
from verl_padding.plan import Job, Layout, Pass, PlanError, Rows, Update, plan_batch
from verl_padding.plan.calls import SyncPoint
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.forest import Forest
from verl_padding.plan.mini_batch_costs import layout_time
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


def test_no_cut_of_a_few_chains_beats_the_bound_and_the_plan_is_near():
    draw, over = random.Random(3), []
    for _ in range(60):
        keys, tokens, chain_R = [], [], []
        for number in range(draw.randint(2, 4)):
            for turn in range(draw.randint(1, 3)):
                keys.append(f"p{number}_0_{turn}")
                tokens.append(draw.randint(4, 20) + (tokens[-1] if turn else 0))
                chain_R.append(number)
        plan = plan_batch(chained(keys, tokens, chain_R), job_of(mini=8))
        time = time_of(tokens, chain_R, plan.layouts["actor"])
        # Rows of a chain in one place cost what the longest of them does: no cut of it is cheaper.
        longest = [
            max(t for t, c in zip(tokens, chain_R, strict=True) if c == chain)
            for chain in set(chain_R)
        ]
        fastest = least_time(sorted(longest, reverse=True), ())
        assert time / plan.figures["actor"].micro_over_lower_bound <= fastest * (1 + 1e-9)
        over.append(time / fastest)
    # Pads, which the fastest cut does not have, are a tenth of such short rows.
    assert np.median(over) < 1.03, over
    assert max(over) < 1.2, over


def cost_of(tokens: int) -> int:
    return int(attention_cost(np.array([tokens]))[0])


def time_of(tokens_R: Sequence[int], chain_R: Sequence[int], layout: Layout) -> int:
    """Cost of the slowest rank of each micro-batch, of each chain its longest row, within the
    budget."""
    time = 0
    for m in range(layout.n_mini_batches):
        of_ranks = [layout.micro_batches(m, rank) for rank in range(layout.dp_size)]
        for held_D in zip(*of_ranks, strict=True):
            loads = []
            for held in held_D:
                longest = {row: 2 for row in held if row >= len(tokens_R)}  # pads
                for row in held:
                    if row < len(tokens_R):
                        chain = -1 - chain_R[row]
                        longest[chain] = max(longest.get(chain, 0), tokens_R[row])
                assert sum(longest.values()) <= BUDGET
                loads.append(sum(map(cost_of, longest.values())))
            time += max(loads)
    return time


Level = tuple[tuple[int, int], ...]
"""Cost and tokens of each rank in a micro-step."""


def least_time(tokens: Sequence[int], levels: tuple[Level, ...]) -> int:
    """The least sum of the heights over all ways to put these rows into micro-steps, pads left
    out."""
    if not tokens:
        return sum(max(load for load, _ in level) for level in levels)
    first, *others = tokens
    times = []
    for number, level in enumerate((*levels, ((0, 0),) * 2)):
        for rank, (load, used) in enumerate(level):
            if used + first <= BUDGET:
                filled = (*level[:rank], (load + cost_of(first), used + first), *level[rank + 1 :])
                times.append(least_time(others, (*levels[:number], filled, *levels[number + 1 :])))
    return min(times)


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with packer='verl'.*packer='plan'"):
        replace(job_of(), packer="verl")


def times(rows: Rows, job: Job) -> dict[str, int]:
    """What each call takes that has a layout of its own, by the plan's own cost."""
    layouts = plan_batch(rows, job).layouts
    own = {name: call for name, call in job.calls() if reuses_layout_of(job, call) is None}
    return {
        name: layout_time(layouts[name], costs_of(rows, job, call)) for name, call in own.items()
    }


@settings(max_examples=80)
@given(rows=batches(max_prompts=4, max_rows=6), job=jobs(pass_cut_as_update=True, sharing="on"))
def test_no_call_takes_longer_than_without_sharing(rows, job):
    less = replace(job, may_branch=False), replace(job, sharing="off")
    branches, whole, off = (times(rows, each) for each in (job, *less))
    assert whole == times(replace(rows, forest=rows.forest and rows.forest.whole_beginnings()), job)
    for name, time in off.items():
        assert max(branches[name], whole[name]) <= time


def test_rows_that_part_cost_no_less_than_their_lower_bound():
    # A row of 150, and eight of about 85 whose first 79 are the same, beside eight of 15 alone;
    # thousands of tokens.
    tokens = [thousands * 1000 for thousands in (150, 80, *[89] * 7, *[15] * 8)]
    keys = [
        "a_0_0",
        *[f"b_{session}_0" for session in range(8)],
        *[f"c{prompt}_0_0" for prompt in range(8)],
    ]
    forest = Forest.in_order(tokens, range(17), [0, 0, *[79_000] * 7, *[0] * 8])
    update = Update(dp_size=2, token_budget=150_010, prompts_per_mini_batch=10)
    job = Job(
        strategy="rows", prompts=10, sessions_per_prompt=1, updates={"actor": update}, inference={}
    )
    plan = plan_batch(
        Rows.from_keys(keys, tokens, forest=forest), replace(job, packer="plan", sharing="on")
    )
    assert plan.figures["actor"].sharing_factor > 2
    assert plan.figures["actor"].micro_over_lower_bound >= 1


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
