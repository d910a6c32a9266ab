"""Runs of the recipes over several seeds, as last measured: of the recipes as they are, and as good as promised."""

from itertools import product
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks import source_job
from benchmarks.learning import CONTEXT_RESET, EVERY_CALL, SUBAGENTS, Learning
from benchmarks.recipe_runs import recipe_of
from benchmarks.results import kept
from verl_padding.cli.app import app
from verl_padding.recipes.every_call.job import THINKING

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("benchmark", "recipe", "side", "goal", "seeds"),
    [
        ("demo_seeds", "context_reset_tiny", "padded", CONTEXT_RESET, 10),
        ("subagents_seeds", "subagents_tiny", "padded", SUBAGENTS, 3),
        ("every_call_seeds", "every_call_tiny", "shared", EVERY_CALL, 3),
    ],
)
def test_what_is_kept_is_of_the_recipe_as_it_is_and_every_seed_learns(benchmark, recipe, side, goal, seeds):
    found = kept(benchmark)
    assert found["recipe"] == recipe_of(recipe), f"run python -m benchmarks.{benchmark} --keep"
    assert found["steps"] == recipe_of(recipe)["trainer"]["total_training_steps"] == goal.steps
    assert found.get("overrides", []) == []
    runs = {name: run for name, run in found["runs"].items() if name.startswith(side)}
    assert len(runs) >= seeds
    for name, run in runs.items():
        learning = Learning(run["reward"], goal)
        assert len(run["reward"]) == goal.steps
        assert learning.learned is True, f"{name}: {learning}"
        assert run.get("sharing_factor", 2) > 1.8


def test_the_steps_of_the_demo_are_enough_on_every_seed():
    (parameter,) = [each for each in get_command(app).commands["demo"].params if each.name == "steps"]
    runs = kept("demo_seeds")["runs"].values()
    assert all(Learning(run["reward"][: parameter.default], CONTEXT_RESET).learned for run in runs)


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
    for side, want in (("padded", (4, 4)), ("stock", (5, 18))):
        steps = [number for name, run in runs.items() if name.startswith(side) for number in run["optimizer_steps"]]
        assert (min(steps), max(steps)) == want


def test_with_a_model_that_thinks_trees_share_and_chains_do_not_and_the_page_says_so():
    it = kept("every_call_thinking")
    assert (it["recipe"], it["overrides"]) == (recipe_of("every_call_tiny"), list(THINKING))
    runs = it["runs"]
    trees = [runs[f"trees_seed{seed}"] for seed in range(3)]
    assert min(run["sharing_factor"] for run in trees) > 2
    assert min(run["rows_of_a_session"] for run in trees) > 1.5
    assert runs["chains_seed0"]["sharing_factor"] == runs["off_seed0"]["sharing_factor"] == 1
    page = (ROOT / "recipes" / "every_call" / "README.md").read_text()
    for title, figure in (
        ("tokens / computed tokens, trees", "sharing_factor"),
        ("rows of a session", "rows_of_a_session"),
        ("mean reward of a session", "last"),
    ):
        assert f"| {title} | {' | '.join(f'{run[figure]:.2f}' for run in trees)} |" in page
