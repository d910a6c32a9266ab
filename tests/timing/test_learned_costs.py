"""A job learns what its micro-batches cost, on simulated clusters whose true costs are known."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.timing.test_laps import lap
from verl_padding.errors import PaddingDataError
from verl_padding.plan import COST_MODELS, BatchPlan, Job, Rows, Update, plan_batch
from verl_padding.plan.measured_cost import MeasuredCost
from verl_padding.timing import learned_costs
from verl_padding.timing.laps import Lap
from verl_padding.timing.learned_costs import FILE, LearnedCosts

FORMULAS = {"actor": COST_MODELS["attention"]}
RANKS, BUDGET = 4, 8192
Seconds = Callable[[tuple[int, ...]], float]
"""True seconds of a micro-batch, by the tokens of its rows."""


def sliding_window(tokens: tuple[int, ...]) -> float:
    """Attention to the last 1,024 tokens only, which no coefficient of the fit is for."""
    pairs = sum(min(n, 1024) * (n - min(n, 1024) / 2) for n in tokens)
    return 0.01 + 1e-5 * sum(tokens) + 1e-8 * pairs


TRUE: dict[str, Seconds] = {
    "dense": lambda tokens: 0.01 + 1e-5 * sum(tokens) + 2e-9 * sum(n * n for n in tokens),
    "mixture of experts": lambda tokens: 0.05 + 4e-6 * sum(tokens) + 5e-9 * sum(n * n for n in tokens),
    "sliding window": sliding_window,
    "quadratic": lambda tokens: 0.02 + 2e-5 * sum(tokens) + 2e-8 * sum(tokens) ** 2,
}


def rows_of_step(step: int, number: int = 96) -> Rows:
    draw = random.Random(step)
    tokens = [min(int(draw.lognormvariate(6.3, 1)) + 2, 4096) for _ in range(number)]
    return Rows.from_keys([f"p{row % 8}_{row % 2}_{row}" for row in range(number)], tokens)


def job_of(cost_model) -> Job:
    update = Update(dp_size=RANKS, token_budget=BUDGET, prompts_per_mini_batch=4, cost_model=cost_model)
    return Job(
        strategy="rows", prompts=8, sessions_per_prompt=2, updates={"actor": update}, inference={}, packer="plan"
    )


def micro_batches(plan: BatchPlan, rows: Rows) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Tokens of each micro-batch, pads with their two, by mini-batch, micro-batch and rank."""
    layout = plan.layouts["actor"]
    return {
        (mini, micro, rank): tuple(rows.tokens_R[row] if row < len(rows) else 2 for row in held)
        for mini in range(layout.n_mini_batches)
        for rank in range(RANKS)
        for micro, held in enumerate(layout.micro_batches(mini, rank))
    }


def seconds_of(step: int, plan: BatchPlan, rows: Rows, seconds: Seconds) -> dict[tuple[int, int, int], float]:
    """Seconds of each micro-batch, by mini-batch, micro-batch and rank: 5 % of noise, and rank 1 a fifth slower."""
    draw = random.Random(1000 + step)
    return {
        at: seconds(tokens) * draw.uniform(0.95, 1.05) * (1.2 if at[2] == 1 else 1.0)
        for at, tokens in micro_batches(plan, rows).items()
    }


def slowest_of(took: dict[tuple[int, int, int], float]) -> dict[tuple[int, int], float]:
    """Seconds of the slowest rank, by mini-batch and micro-batch."""
    slowest: dict[tuple[int, int], float] = {}
    for (mini, micro, _), each in took.items():
        slowest[mini, micro] = max(slowest.get((mini, micro), 0.0), each)
    return slowest


def time_of(took: dict[tuple[int, int, int], float]) -> float:
    """Seconds of a step whose ranks meet at each micro-batch."""
    return sum(slowest_of(took).values())


def timed_step(step: int, plan: BatchPlan, rows: Rows, seconds: Seconds, *, told_apart: bool) -> list[Lap]:
    """What clocks would say; with events alone, all ranks show the slowest."""
    held, took = micro_batches(plan, rows), seconds_of(step, plan, rows, seconds)
    slowest = slowest_of(took)
    return [
        lap(rank, micro, slowest[mini, micro], took[mini, micro, rank] if told_apart else None, tokens, mini_batch=mini)
        for (mini, micro, rank), tokens in held.items()
    ]


def learn(seconds: Seconds, steps: int, *, told_apart: bool = True) -> tuple[LearnedCosts, list[str]]:
    costs, told = LearnedCosts(), []
    for step in range(1, steps + 1):
        rows = rows_of_step(step)
        plan = plan_batch(rows, job_of(costs.cost_of("actor", cut_by_plan=True)))
        told += costs.learn(timed_step(step, plan, rows, seconds, told_apart=told_apart), FORMULAS, FORMULAS)
    return costs, told


class Known:
    """A cost model that knows the truth of a row alone."""

    def __init__(self, seconds: Seconds):
        self.seconds = seconds

    def __call__(self, tokens_R):
        nothing = self.seconds(())
        return np.array([round((self.seconds((int(n),)) - nothing) * 1e9) for n in tokens_R], dtype=np.int64)


def best_known(name: str, step: int, rows: Rows) -> float:
    """Seconds of the plan that knows the truth of all rows, though not that a rank is slow."""
    truth = {
        "quadratic": MeasuredCost(handling_s=0.02, per_token_s=2e-5, per_square_s=2e-8, per_pair_s=2e-8),
        "dense": MeasuredCost(handling_s=0.01, per_token_s=1e-5, per_square_s=2e-9, per_pair_s=0.0),
        "mixture of experts": MeasuredCost(handling_s=0.05, per_token_s=4e-6, per_square_s=5e-9, per_pair_s=0.0),
    }.get(name, Known(TRUE[name]))
    return time_of(seconds_of(step, plan_batch(rows, job_of(truth)), rows, TRUE[name]))


@pytest.mark.parametrize(
    ("name", "told_apart"),
    [("dense", True), ("mixture of experts", False), ("sliding window", True), ("quadratic", False)],
)
def test_after_ten_steps_the_plan_is_within_three_percent_of_one_that_knows_the_truth(name: str, told_apart: bool):
    costs, _ = learn(TRUE[name], 10, told_apart=told_apart)
    cost = costs.cost_of("actor", cut_by_plan=True)
    ratios = []
    for step in range(100, 110):
        rows = rows_of_step(step)
        learned = time_of(seconds_of(step, plan_batch(rows, job_of(cost)), rows, TRUE[name]))
        ratios.append(learned / best_known(name, step, rows))
    assert np.mean(ratios) < 1.03, ratios


def rows_of_two_kinds(step: int, mini_batches: int) -> Rows:
    """Of each mini-batch, a long row for each rank and many short ones: its levels are a full and an empty one."""
    draw = random.Random(step)
    keys, tokens = [], []
    for mini_batch in range(mini_batches):
        lengths = [draw.randint(5000, 8000) for _ in range(RANKS)] + [draw.randint(20, 400) for _ in range(48)]
        keys += [f"p{mini_batch}_0_{row}" for row in range(len(lengths))]
        tokens += lengths
    return Rows.from_keys(keys, tokens)


def job_of_two_levels(cost_model, mini_batches: int) -> Job:
    job = job_of(cost_model)
    actor = replace(job.updates["actor"], prompts_per_mini_batch=1)
    return replace(job, strategy="prompt", prompts=mini_batches, updates={"actor": actor})


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("told_apart", [True, False], ids=["on a CPU", "by events"])
def test_costs_are_learned_where_full_and_empty_micro_batches_take_turns(told_apart, mini_batches, monkeypatch):
    monkeypatch.setattr(learned_costs, "MOST", 40)  # of every second one
    costs, true = LearnedCosts(), TRUE["sliding window"]
    for step in range(1, 10):
        rows = rows_of_two_kinds(step, mini_batches)
        plan = plan_batch(rows, job_of_two_levels(costs.cost_of("actor", cut_by_plan=False), mini_batches))
        costs.learn(timed_step(step, plan, rows, true, told_apart=told_apart), FORMULAS, ())
    assert costs.cost_of("actor", cut_by_plan=False) is not None, "the formula is off by more"
    fit, held = costs.fitted()["actor"], list(micro_batches(plan, rows).values())
    ratios = fit.seconds(held) / [true(tokens) for tokens in held]
    assert max(ratios) / min(ratios) < 1.4, "it knows both kinds"


def test_the_plan_changes_over_when_the_fit_has_been_better_and_says_so_once():
    costs, told = learn(TRUE["quadratic"], 4)
    assert costs.cost_of("actor", cut_by_plan=True) is not None
    changed = [each for each in told if "is planned by" in each]
    assert len(changed) == 1
    assert changed[0].startswith("from the next update on, actor is planned by measured costs: over 2 updates measured")


def micro_batches_beside_the_formulas(seconds: Seconds, steps: int, cut_by_plan=FORMULAS) -> tuple[list[float], str]:
    """How many times as many micro-batches each step had as by the formula, and what was said."""
    costs, ratios, told = LearnedCosts(), [], []
    for step in range(1, steps + 1):
        rows = rows_of_step(step)
        plan, by_formula = (plan_batch(rows, job_of(cost)) for cost in (costs.cost_of("actor", cut_by_plan=True), None))
        ratios.append(plan.layouts["actor"].n_micro_batches / by_formula.layouts["actor"].n_micro_batches)
        told += costs.learn(timed_step(step, plan, rows, seconds, told_apart=True), FORMULAS, cut_by_plan)
    return ratios, "\n".join(told)


def test_where_all_micro_batches_were_as_full_one_step_tries_half_of_it_and_says_so_and_none_of_the_next_does():
    ratios, told = micro_batches_beside_the_formulas(TRUE["dense"], 20)
    assert [step for step, ratio in enumerate(ratios, start=1) if ratio > 1.2] == [3]
    assert told.count(" tries ") == 1
    assert "the next update tries micro-batches of " in told


def test_what_a_step_has_tried_is_not_forgotten_when_all_others_are_as_full_again():
    ratios, _ = micro_batches_beside_the_formulas(TRUE["quadratic"], 20)
    assert min(ratios[3:]) > 1.8


def test_where_the_plan_does_not_cut_micro_batches_no_step_tries_another_fill():
    _, told = micro_batches_beside_the_formulas(TRUE["dense"], 4, cut_by_plan=())
    assert " tries " not in told


@pytest.mark.parametrize("seed", range(2))
def test_where_the_formula_is_right_noise_changes_no_plan(seed: int):
    formula, draw = FORMULAS["actor"], random.Random(seed)
    costs, told = LearnedCosts(), []
    for step in range(1, 25):
        rows = rows_of_step(step)
        plan = plan_batch(rows, job_of(costs.cost_of("actor", cut_by_plan=False)))
        timed = timed_step(step, plan, rows, lambda tokens: 1.0, told_apart=True)
        laps = [
            replace(
                each, busy_s=int(formula(np.array(each.computed_tokens)).sum()) * 1e-9 * draw.lognormvariate(0, 0.02)
            )
            for each in timed
        ]
        told += costs.learn(laps, FORMULAS, ())
    assert costs.fitted(), "there is a fit, too"
    assert not told


def test_costs_are_the_same_after_they_were_saved_and_so_is_what_the_next_step_is_to_try(tmp_path: Path):
    costs, _ = learn(TRUE["quadratic"], 2)
    costs.write(tmp_path / "global_step_2" / FILE)
    resumed = LearnedCosts.read(tmp_path / "global_step_2" / FILE)
    for step in range(3, 6):
        rows, (cost, again) = rows_of_step(step), (each.cost_of("actor", cut_by_plan=True) for each in (costs, resumed))
        assert cost == again is not None
        assert (cost.trial_fill > 0) is (step == 3)
        timed = timed_step(step, plan_batch(rows, job_of(cost)), rows, TRUE["quadratic"], told_apart=True)
        with_verls_packer = resumed.cost_of("actor", cut_by_plan=False)
        assert with_verls_packer is None or with_verls_packer.trial_fill == 0
        for each in (costs, resumed):
            each.learn(timed, FORMULAS, FORMULAS)
    assert costs.fitted() == resumed.fitted()


@pytest.mark.parametrize("text", ["", "[]", '{"actor": {"cost": {"handling_s": 1}}}', '{"actor": 3}'])
def test_a_file_that_holds_no_costs_is_refused(text: str, tmp_path: Path):
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(PaddingDataError, match="no costs of a job with padding"):
        LearnedCosts.read(path)


@pytest.mark.parametrize(
    ("ranks", "n_rows", "name"),
    [(32, 1024, "dense"), (8, 300, "mixture of experts"), (8, 300, "sliding window"), (32, 2048, "quadratic")],
)
def test_no_step_is_much_slower_than_by_the_formula_and_what_was_gained_stays(ranks, n_rows, name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RANKS", ranks)
    costs, ratios = LearnedCosts(), []
    for step in range(1, 9):
        rows = rows_of_step(step, n_rows)
        plan, by_formula = (plan_batch(rows, job_of(cost)) for cost in (costs.cost_of("actor", cut_by_plan=True), None))
        ours, formulas = (
            time_of({at: TRUE[name](tokens) for at, tokens in micro_batches(each, rows).items()})
            for each in (plan, by_formula)
        )
        ratios.append(ours / formulas)
        costs.learn(timed_step(step, plan, rows, TRUE[name], told_apart=False), FORMULAS, FORMULAS)
    # Equally full micro-batches tell little: one step tries half as full ones, whatever a micro-batch takes by itself.
    tried = max(ratios)
    assert tried < 1.55
    assert max(ratio for ratio in ratios if ratio != tried) < 1.12
    assert ratios[-1] < 1.02
    assert ratios[-1] < min(ratios) + 0.15, "a gain was given up"
