"""The promises of the plan, on random batches and jobs, each against a slow and obvious oracle."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn_jobs import batches, jobs
from tests.support.fresh_processes import run_fresh
from tests.support.pages import ROOT
from tests.support.plan_oracles import (
    EXAMPLES,
    MOSTLY_CUT_BY_PLAN,
    OFTEN,
    held_M,
    leaves,
    met,
    none_is_vacuous,
    planned,
    reporting_ranks,
)
from verl_padding.pads.planned_call import cut_into
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.planner import reuses_layout_of
from verl_padding.plan.strategies import STRATEGIES


@pytest.fixture(scope="module", autouse=True)
def _not_vacuous():
    yield from none_is_vacuous(
        often=(*OFTEN, "fewer steps"),
        now_and_then=(
            "rows that are left out",
            "steps of zero-advantage rows alone",
            "pads of a fixed size",
            "more steps than configured",
            "steps bounded by prompts",
        ),
    )


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_every_real_row_is_in_exactly_one_local_batch_of_each_layout(rows, job):
    plan = planned(rows, job)
    for layout in plan.layouts.values():
        assert sorted(row for held in held_M(layout) for row in held) == [*range(len(rows))]
        assert sorted(layout.order) == [*range(len(rows) + layout.n_pads)]
    assert set(plan.layouts) == {name for name, _ in job.calls()}
    assert plan.n_pads == max(layout.n_pads for layout in plan.layouts.values())


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_verls_dispatch_of_the_order_gives_the_local_batches(rows, job):
    plan = planned(rows, job)
    for name, call in job.calls():
        layout = plan.layouts[name]
        # verl: equal contiguous chunks a rank (KVBatchMeta.chunk), then what the batch_sampler says
        # (make_iterator).
        order, size = list(layout.order), len(layout.order) // call.dp_size
        assert len(order) % call.dp_size == 0
        sampler = cut_into(layout)["dataloader_kwargs"]["batch_sampler"]
        for rank in range(call.dp_size):
            chunk = order[rank * size : (rank + 1) * size]
            assert [tuple(chunk[place] for place in of) for of in sampler] == [
                ranks[rank] for ranks in layout.local_batches
            ]
        assert all(rows % call.local_batch_multiple == 0 for rows in layout.local_batch_rows_M)


UNIT_R = {"prompt": "prompt_R", "rows": "key_R", "lcm": "key_R"}
"""Strategy -> the column of `Rows` by which it keeps rows in one mini-batch."""
FIXED = tuple(name for name, strategy in STRATEGIES.items() if not strategy.has_own_steps)


def fixed_jobs(steps):
    """Jobs that take their optimizer steps as they say, configured or by rows."""
    return jobs(strategies=FIXED).map(lambda job: replace(job, optimizer_steps=steps))


@EXAMPLES
@given(rows=batches(), job=fixed_jobs("configured"))
def test_the_steps_are_the_configured_ones_whatever_the_number_of_rows(rows, job):
    plan = planned(rows, job)
    for name, update in job.updates.items():
        configured = job.prompts // update.prompts_per_mini_batch
        units = len(set(getattr(rows, UNIT_R[job.strategy])))
        assert plan.layouts[name].n_mini_batches == min(configured, units)
        assert any(
            f"{name}: " in warning and f"of {configured} optimizer" in warning
            for warning in plan.warnings
        ) == (units < configured)


@EXAMPLES
@given(rows=batches(), job=fixed_jobs("by_rows"))
def test_steps_by_rows_are_those_the_rows_fill_and_at_most_one_a_unit(rows, job):
    plan = planned(rows, job)
    for name, update in job.updates.items():
        filled, room = 1, update.prompts_per_mini_batch * job.sessions_per_prompt
        while filled * room < len(rows):
            filled += 1
        units = len(set(getattr(rows, UNIT_R[job.strategy])))
        assert plan.layouts[name].n_mini_batches == min(filled, units)
        met["more steps than configured"] += filled > job.prompts // update.prompts_per_mini_batch
        met["steps bounded by prompts"] += units < filled
    assert not plan.warnings


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_each_step_and_each_rank_has_real_rows_if_there_are_enough(rows, job):
    plan = planned(rows, job)
    for name, update in job.updates.items():
        layout = plan.layouts[name]
        assert min(layout.real_rows_M) >= 1
        for real, reporting in zip(held_M(layout), reporting_ranks(layout), strict=True):
            # A chain on one rank is computed once.
            items = leaves(rows, job, update, real)
            assert min(len(items), update.dp_size) <= reporting <= min(len(real), update.dp_size)


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_real_rows_are_spread_as_evenly_as_the_unit_allows(rows, job):
    plan = planned(rows, job)
    largest_unit = max(Counter(getattr(rows, UNIT_R[job.strategy])).values())
    for name in job.updates:
        real_M = plan.layouts[name].real_rows_M
        assert max(real_M) - min(real_M) <= largest_unit


@EXAMPLES
@given(rows=batches(), job=jobs(strategies=("prompt",)))
def test_a_prompt_stays_whole_and_prompts_are_spread_evenly(rows, job):
    plan = planned(rows, job)
    for name in job.updates:
        prompts_M = [{rows.prompt_R[row] for row in held} for held in held_M(plan.layouts[name])]
        assert sum(map(len, prompts_M)) == len(set(rows.prompt_R))
        assert max(map(len, prompts_M)) - min(map(len, prompts_M)) <= 1


@EXAMPLES
@given(rows=batches(), job=jobs(strategies=("lcm",)))
def test_lcm_takes_verls_number_of_steps_and_has_as_many_rows_as_verl(rows, job):
    plan = planned(rows, job)
    multiple = job.row_multiple
    for update in job.updates.values():
        multiple = math.lcm(
            multiple, update.dp_size, update.prompts_per_mini_batch * job.sessions_per_prompt
        )
    padded = len(rows)
    while padded % multiple:
        padded += 1
    for name, update in job.updates.items():
        layout, size = plan.layouts[name], update.prompts_per_mini_batch * job.sessions_per_prompt
        assert layout.n_mini_batches == min(padded // size, len(rows))
        assert set(layout.local_batch_rows_M) == {size // update.dp_size}
        met["pads of a fixed size"] += layout.n_pads
        assert layout.n_pads == padded - len(rows) or any(
            name in warning for warning in plan.warnings
        )
    most_rows = max(len(plan.layouts[name].order) for name in job.updates)
    for name, call in job.inference.items() if not plan.warnings else ():
        unit = call.dp_size * call.local_batch_multiple
        assert len(plan.layouts[name].order) == -(-most_rows // unit) * unit


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_whoever_packs_the_mini_batches_hold_the_same_rows(rows, job):
    by_packer = [
        planned(rows, replace(job, packer="verl", sharing="off")),
        planned(rows, replace(job, packer="plan")),
    ]
    for name in job.updates:
        verls, ours = (map(sorted, held_M(plan.layouts[name])) for plan in by_packer)
        assert [*verls] == [*ours]


@EXAMPLES
@given(drawn=MOSTLY_CUT_BY_PLAN)
def test_the_same_input_gives_the_same_plan(drawn):
    rows, job = drawn
    assert plan_batch(replace(rows), replace(job)) == planned(rows, job)


PLANNED = """
import json
import random

import numpy as np

from verl_padding.plan import STRATEGIES, Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.prefix_tries import PrefixTries

draw = random.Random(0)
keys = [f"prompt {row % 12}_{row // 12 % 3}_{row // 36}" for row in range(90)]
ids = [np.arange(draw.randint(2, 300)) // draw.randint(100, 300) for _ in keys]
tries = PrefixTries.from_tokens(ids, [key.split("_")[0] for key in keys])
rows = Rows.from_keys(keys, list(map(len, ids)), tries)
call = {"dp_size": 2, "token_budget": 400}
for strategy in STRATEGIES:
    update = Update(**call, prompts_per_mini_batch=4, shuffle=True)
    job = Job(
        strategy=strategy,
        prompts=12,
        sessions_per_prompt=3,
        updates={"actor": update, "critic": update},
        inference={"log_prob": Pass(**call, as_update="actor"), "values": Pass(**call)},
        packer="plan",
        sharing="on",
        seed=5,
    )
    plan = plan_batch(rows, job)
    print(json.dumps([vars(layout) for layout in plan.layouts.values()], default=str))
"""


def test_processes_that_hash_texts_in_other_ways_plan_the_same(monkeypatch):
    told = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        run = run_fresh(PLANNED, platform=None, folder=ROOT)
        assert run.returncode == 0, run.stderr[-2000:]
        told.append(run.stdout.splitlines())
    assert told[0] == told[1]
    assert len(set(told[0])) == len(STRATEGIES)


@EXAMPLES
@given(
    rows=batches(),
    job=st.one_of(jobs(), jobs(pass_cut_as_update=True)),
    part=st.sampled_from([0.3, 0.7, 1]),
)
def test_zero_advantage_rows_are_dropped_from_an_update_and_its_mini_batches_stay(rows, job, part):
    update = replace(job.updates["actor"], drops_zero_advantage=True)
    less, all_rows = replace(job, updates=dict(job.updates, actor=update)), planned(rows, job)
    zero_advantage = Random(len(rows)).sample(range(len(rows)), int(len(rows) * part))
    plan = planned(replace(rows, zero_advantage=tuple(zero_advantage)), less)
    layout, whole = plan.layouts["actor"], all_rows.layouts["actor"]
    assert list(map(sorted, layout.rows_M)) == list(map(sorted, whole.rows_M))
    for rows_of, held in zip(whole.rows_M, map(sorted, held_M(layout)), strict=True):
        met["rows that are left out"] += len(rows_of) - len(held)
        met["steps of zero-advantage rows alone"] += set(rows_of) <= set(zero_advantage)
        first = [row for row in zero_advantage if row in rows_of][:1]
        assert held == (sorted(set(rows_of) - set(zero_advantage)) or first)
    assert len(layout.order) == len(set(layout.order))
    for name, call in job.inference.items():
        order = plan.layouts[name].order
        assert sorted(row for row in order if row < len(rows)) == list(range(len(rows)))
        assert len(order) == len(set(order))
        assert len(order) % call.dp_size == 0
        if reuses_layout_of(job, call) != "actor":
            # Mini-batches without zero-advantage rows have no fixed size that a pass would share.
            assert job.strategy == "lcm" or plan.layouts[name] == all_rows.layouts[name]
            continue
        for rank in range(call.dp_size):
            of_update, of_pass = (
                [
                    real
                    for rows_DK in each.rows_MDK
                    for held in rows_DK[rank]
                    if (real := {row for row in held if row < len(rows)})
                ]
                for each in (layout, plan.layouts[name])
            )
            assert of_pass[: len(of_update)] == of_update


@EXAMPLES
@given(
    prompts=st.sampled_from([2, 4, 8]),
    n=st.sampled_from([2, 4]),
    mini=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_a_uniform_batch_has_no_pads_and_the_mini_batches_of_fixed_slicing(prompts, n, mini, data):
    keys = [f"p{p}_{s}_0" for p in range(prompts) for s in range(n)]
    tokens = data.draw(st.lists(st.integers(2, 300), min_size=len(keys), max_size=len(keys)))
    rows = Rows.from_keys(keys, tokens)
    size = mini * n
    for strategy, steps in product(STRATEGIES, ("configured", "by_rows")):
        # Micro-batches cut by rows: with a token budget the plan may buy balance with pads.
        update = Update(dp_size=2, prompts_per_mini_batch=mini)
        job = Job(
            strategy=strategy,
            optimizer_steps=steps,
            prompts=prompts,
            sessions_per_prompt=n,
            updates={"actor": update},
            inference={},
        )
        plan = planned(rows, job)
        assert plan.n_pads == 0
        assert [*map(sorted, held_M(plan.layouts["actor"]))] == [
            [*range(start, start + size)] for start in range(0, prompts * n, size)
        ]
