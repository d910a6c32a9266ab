"""Runs of the recipes over several seeds, as last measured: of the recipes as they are, and as good as promised."""

from itertools import product
from pathlib import Path

import pytest

from benchmarks import source_job
from benchmarks.recipe_runs import recipe_of
from benchmarks.results import kept
from verl_padding.recipes.context_reset.job import GOAL as DEMO_GOAL
from verl_padding.recipes.every_call.job import GOAL as EVERY_CALL_GOAL
from verl_padding.recipes.subagents.job import GOAL as SUBAGENTS_GOAL
from verl_padding.runs.learning import Goal, Learning

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("benchmark", "recipe"),
    [
        ("demo_seeds", "context_reset_tiny"),
        ("subagents_seeds", "subagents_tiny"),
        ("every_call_seeds", "every_call_tiny"),
    ],
)
def test_what_is_kept_is_of_the_recipe_as_it_is(benchmark, recipe):
    assert kept(benchmark)["recipe"] == recipe_of(recipe), f"run python -m benchmarks.{benchmark} --keep"
    assert kept(benchmark)["steps"] == recipe_of(recipe)["trainer"]["total_training_steps"]
    assert kept(benchmark).get("overrides", []) == []


def test_ten_seeds_of_the_demo_learn_and_none_loses_what_it_has_learned():
    runs = {name: run for name, run in kept("demo_seeds")["runs"].items() if name.startswith("padded")}
    assert len(runs) >= 10
    for name, run in runs.items():
        learning = Learning(run["reward"], DEMO_GOAL)
        assert len(run["reward"]) == DEMO_GOAL.steps
        assert learning.learned is True, f"{name}: {learning}"
        assert run["last"] == pytest.approx(learning.last, abs=1e-3)
        assert learning.last >= 0.95
        assert learning.lowest >= 0.9


def test_three_seeds_of_the_subagents_padded_and_stock_are_kept_and_the_padded_ones_learn():
    runs = kept("subagents_seeds")["runs"]
    assert set(runs) >= {f"{trainer}_seed{seed}" for trainer in ("padded", "stock") for seed in range(3)}
    for name, run in runs.items():
        learning = Learning(run["reward"], SUBAGENTS_GOAL)
        assert len(run["reward"]) == SUBAGENTS_GOAL.steps
        assert run["last"] == pytest.approx(learning.last, abs=1e-3)
        assert run["optimizer_steps"] == [4, 4] or name.startswith("stock")
        assert learning.learned is True or name.startswith("stock"), f"{name}: {learning}"


def test_three_seeds_of_every_call_are_kept_and_learn_more_than_an_agent_without_memory():
    runs = [run for name, run in kept("every_call_seeds")["runs"].items() if name.startswith("shared")]
    assert len(runs) >= 3
    for run in runs:
        learning = Learning(run["reward"], EVERY_CALL_GOAL)
        assert len(run["reward"]) == EVERY_CALL_GOAL.steps
        assert learning.learned is True, learning
        assert learning.last > 0.7
        assert run["sharing_factor"] > 1.8


def test_the_source_job_is_kept_as_it_is_and_lcm_and_prompt_learn_with_and_without_a_critic():
    it = kept("source_job")
    assert it["recipe"] == recipe_of(source_job.RECIPE)
    assert (it["job"], it["steps"]) == (list(source_job.JOB), source_job.GOAL.steps)
    names = product(source_job.ESTIMATORS, source_job.SIDES, range(it["seeds"]))
    assert it["runs"].keys() == {f"{estimator}_{side}_seed{seed}" for estimator, side, seed in names}
    for name, run in it["runs"].items():
        assert len(run["reward"]) == len(run["optimizer_steps_taken"]) == it["steps"]
        assert min(run["grad_norm"]) > 0, name
        assert max(run["rows"]) > min(run["rows"]), "the row counts were meant to vary"
        taken = run["optimizer_steps_taken"]
        if "_prompt_" in name:
            assert taken == [source_job.PROMPTS // source_job.MINI_BATCH] * it["steps"]
        else:
            assert taken == [-(-rows // (source_job.MINI_BATCH * source_job.SESSIONS)) for rows in run["rows"]]
        if "_lcm_" in name:
            assert run["fewest_real_rows"] == [rows // steps for rows, steps in zip(run["rows"], taken, strict=True)]
        learning = Learning(run["reward"], source_job.GOAL)
        assert learning.learned is True or "_stock_" in name, f"{name}: {learning}"


def test_the_page_of_the_subagents_says_what_is_kept():
    runs = kept("subagents_seeds")["runs"]
    page = (ROOT / "recipes" / "subagents" / "README.md").read_text()
    for trainer, title in (("padded", "`+padding=prompt` | 4"), ("stock", "stock verl | 5 to 18")):
        rewards = [f"{runs[f'{trainer}_seed{seed}']['last']:.2f}" for seed in range(3)]
        assert f"| {title} | {' | '.join(rewards)} |" in page
    steps = [number for name, run in runs.items() if name.startswith("stock") for number in run["optimizer_steps"]]
    assert (min(steps), max(steps)) == (5, 18)


RISE = [0.02 * step for step in range(50)]
GOAL = Goal(reward=0.95, floor=0.9, steps=60)


@pytest.mark.parametrize(
    ("rewards", "learned", "reached", "lowest"),
    [
        ([*RISE, *[0.99] * 10], True, 49, 0.96),
        ([*RISE, *[0.99] * 20, 0.89, *[1.0] * 10], False, 49, 0.89),
        ([*RISE, *[0.96] * 4, *[0.94] * 10], False, 49, 0.94),
        ([0.5] * 60, False, None, None),
        ([0.5] * 59, None, None, None),
        ([1.0], True, 1, 1.0),
    ],
)
def test_a_run_has_learned_if_it_reached_its_goal_and_never_lost_it(rewards, learned, reached, lowest):
    learning = Learning(rewards, GOAL)
    assert (learning.learned, learning.reached, learning.lowest) == (learned, reached, lowest)
    assert learning.first == rewards[0]
    assert ("has learned" in str(learning)) is (learned is True)
    assert ("has not learned" in str(learning)) is (learned is False)
    assert ("cannot show whether" in str(learning)) is (learned is None)
