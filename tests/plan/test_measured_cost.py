"""Costs found from seconds, and plans for costs that do not add up over the rows of a micro-batch."""

import json
import random
from dataclasses import astuple, replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.measured_cost import LEAST_LAPS, MeasuredCost, Measurement, fit_cost
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.planner import costs_of

ON_A_CPU = MeasuredCost(handling_s=0.02, per_token_s=2e-5, per_square_s=2e-8, per_pair_s=2e-8)
"""About those of a train step of two FSDP2 ranks with torch's attention."""
ON_A_GPU = MeasuredCost(handling_s=0.01, per_token_s=1e-5, per_square_s=2e-10, per_pair_s=0.0)
MASKED_BESIDE_OTHERS = MeasuredCost(handling_s=0.02, per_token_s=2e-5, per_square_s=5e-9, per_pair_s=2e-8)
"""A row alone goes without a mask, and is computed faster."""


def drawn_micro_batches(draw: random.Random, number: int) -> list[tuple[int, ...]]:
    """Of 1 to 12 rows each, long-tailed."""
    return [
        tuple(min(int(draw.lognormvariate(6, 1)) + 2, 8000) for _ in range(draw.randint(1, 12))) for _ in range(number)
    ]


def noisy(seconds: float, draw: random.Random, share: float) -> float:
    return seconds * (1 + draw.uniform(-share, share))


@pytest.mark.parametrize("true", [ON_A_CPU, ON_A_GPU, MASKED_BESIDE_OTHERS])
@pytest.mark.parametrize("ranks", [1, 4])
def test_coefficients_are_found_from_noisy_seconds_with_stragglers(true: MeasuredCost, ranks: int):
    draw = random.Random(ranks)
    seen = []
    for number in range(300):
        tokens_D = tuple(drawn_micro_batches(draw, ranks))
        seconds = noisy(max(true.seconds(tokens_D)), draw, 0.05)
        seen.append(Measurement.of(seconds * (5 if number % 20 == 0 else 1), tokens_D))
    found = fit_cost(seen)
    assert found is not None
    fresh = drawn_micro_batches(draw, 100)
    errors = np.abs(found.seconds(fresh) / true.seconds(fresh) - 1)
    assert median(errors) < 0.02
    assert max(errors) < 0.15


def test_a_slow_rank_is_told_from_costly_rows_where_only_the_slowest_ranks_seconds_are_known():
    true, draw = MeasuredCost(handling_s=0.01, per_token_s=1e-5, per_square_s=2e-9, per_pair_s=0.0), random.Random(5)
    seen = []
    for _ in range(200):
        tokens_D = tuple(drawn_micro_batches(draw, 4))
        seconds_D = true.seconds(tokens_D) * [1.0, 1.5, 1.0, 1.0]
        seen.append(Measurement.of(noisy(max(seconds_D), draw, 0.03), tokens_D))
    found = fit_cost(seen)
    assert found is not None
    assert found.per_square_s / found.per_token_s == pytest.approx(true.per_square_s / true.per_token_s, rel=0.1)


def test_the_same_measurements_give_the_same_coefficients_also_after_they_were_saved_and_in_any_order():
    draw, seen = random.Random(0), []
    for _ in range(50):
        tokens_D = drawn_micro_batches(draw, 3)
        seen.append(Measurement.of(noisy(max(ON_A_CPU.seconds(tokens_D)), draw, 0.3), tokens_D))
    found = fit_cost(seen)
    assert found is not None
    saved = json.loads(json.dumps([(each.seconds, each.sums_D) for each in seen]))
    again = [Measurement(seconds=seconds, sums_D=tuple(map(tuple, sums_D))) for seconds, sums_D in saved]
    assert fit_cost(again) == found
    assert astuple(fit_cost(draw.sample(seen, len(seen)))) == pytest.approx(astuple(found), rel=1e-6)


def test_no_coefficient_is_negative_and_seconds_that_no_row_explains_are_shared_by_tokens():
    draw = random.Random(1)
    drawn = drawn_micro_batches(draw, 50)
    found = fit_cost([Measurement.of(1.0, [rows]) for rows in drawn])
    assert found is not None
    assert (found.handling_s, found.per_square_s, found.per_pair_s) == (0, 0, 0)
    assert found.per_token_s == pytest.approx(50 / sum(map(sum, drawn)))


def test_few_measurements_give_no_cost():
    seen = [Measurement.of(0.1, [(100,)])] * (LEAST_LAPS - 1)
    assert fit_cost(seen) is None


@given(st.lists(st.integers(2, 5000), min_size=1, max_size=9), st.integers(0, 3))
def test_rows_and_what_they_cost_together_are_the_seconds_of_their_micro_batch(tokens: list[int], kind: int):
    model = replace(ON_A_CPU, per_square_s=[0.0, 1e-9, 1e-7, 3e-8][kind])
    tokens_R = np.array(tokens, dtype=np.int64)
    cost = int(model(tokens_R).sum()) + model.together(tokens_R) + model.handling
    assert cost == pytest.approx(model.seconds([tokens])[0] * 1e9, rel=1e-9, abs=2 * len(tokens))
    priced = model.at(sum(tokens))
    assert int(priced(tokens_R).sum()) + model.handling == pytest.approx(cost, rel=1e-9, abs=2 * len(tokens))


def job_of(model, *, ranks: int, budget: int, strategy: str = "rows") -> Job:
    update = Update(dp_size=ranks, token_budget=budget, prompts_per_mini_batch=4, cost_model=model)
    return Job(
        strategy=strategy, prompts=8, sessions_per_prompt=2, updates={"actor": update}, inference={}, packer="plan"
    )


def drawn_rows(draw: random.Random, number: int) -> Rows:
    tokens = [min(int(draw.lognormvariate(6, 1)) + 2, 4096) for _ in range(number)]
    return Rows.from_keys([f"p{row % 8}_{row % 2}_{row}" for row in range(number)], tokens)


def time_of(plan, rows: Rows, job: Job) -> int:
    return layout_time(plan.layouts["actor"], costs_of(rows, job, job.updates["actor"]))


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), ranks=st.sampled_from([1, 2, 4]))
def test_a_plan_for_costs_that_do_not_add_up_is_a_whole_plan_within_the_budget(seed: int, ranks: int):
    draw = random.Random(seed)
    rows = drawn_rows(draw, draw.randint(ranks, 60))
    job = job_of(ON_A_CPU, ranks=ranks, budget=8192)
    layout = plan_batch(rows, job).layouts["actor"]
    real = sorted(row for row in layout.order if row < len(rows))
    assert real == list(range(len(rows)))
    for mini_batch in range(layout.n_mini_batches):
        for rank in range(ranks):
            for held in layout.micro_batches(mini_batch, rank):
                assert sum(rows.tokens_R[row] if row < len(rows) else job.pad_tokens for row in held) <= 8192


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), ranks=st.sampled_from([1, 2, 4]), fill=st.integers(1, 20000))
def test_micro_batches_of_a_trial_are_as_full_as_it_says_but_for_long_rows_and_never_over_the_budget(seed, ranks, fill):
    draw = random.Random(seed)
    rows = drawn_rows(draw, draw.randint(ranks, 60))
    job = job_of(replace(ON_A_GPU, trial_fill=fill), ranks=ranks, budget=8192)
    layout = plan_batch(rows, job).layouts["actor"]
    most = min(max(fill, int(np.mean(rows.tokens_R))), 8192)
    counts = set()
    for mini_batch in range(layout.n_mini_batches):
        counts.add(tuple(len(layout.micro_batches(mini_batch, rank)) for rank in range(ranks)))
        for rank in range(ranks):
            for held in layout.micro_batches(mini_batch, rank):
                tokens = [rows.tokens_R[row] if row < len(rows) else job.pad_tokens for row in held]
                # A row longer than the fill counts as long as it, and a pad may have to stand beside it.
                assert sum(min(each, most) for each in tokens) <= most
                assert sum(tokens) <= 8192
    assert all(len(set(count)) == 1 for count in counts), "ranks meet at each micro-batch"


def test_where_tokens_of_a_micro_batch_meet_it_is_kept_small_and_the_step_is_shorter():
    shorter = []
    for seed in range(20):
        rows = drawn_rows(random.Random(seed), 96)
        job = job_of(ON_A_CPU, ranks=2, budget=16384)
        learned = plan_batch(rows, job)
        formula = plan_batch(rows, job_of(None, ranks=2, budget=16384))
        assert time_of(learned, rows, job) <= 1.001 * time_of(formula, rows, job)
        assert (learned.layouts["actor"].n_micro_batches or 0) > (formula.layouts["actor"].n_micro_batches or 0)
        shorter.append(time_of(formula, rows, job) / time_of(learned, rows, job))
    assert median(shorter) > 1.3


def test_where_costs_add_up_the_measured_plan_is_near_its_bound():
    for seed in range(10):
        rows = drawn_rows(random.Random(seed), 200)
        plan = plan_batch(rows, job_of(ON_A_GPU, ranks=4, budget=8192))
        assert plan.figures["actor"].micro_over_lower_bound < 1.05


def test_verls_packer_gets_cells_that_are_balanced_for_full_micro_batches():
    rows = drawn_rows(random.Random(3), 64)
    job = replace(job_of(ON_A_CPU, ranks=2, budget=8192), packer="verl")
    layout = plan_batch(rows, job).layouts["actor"]
    cost = ON_A_CPU.at(8192)(np.array(rows.tokens_R))
    for cells in layout.cells:
        loads = [sum(int(cost[row]) for row in cell if row < len(rows)) for cell in cells]
        assert max(loads) < 1.05 * sum(loads) / len(loads)
