"""Runs of the recipes over several seeds, as last measured: of the recipes as they are, and as good
as promised."""

import pytest

from benchmarks.results import kept
from benchmarks.runs import CASES, Learning, recipe_of, runs_of


@pytest.mark.parametrize("name", CASES)
def test_kept_runs_are_of_the_recipe_as_it_is(name):
    found, case = kept(f"runs {name}"), CASES[name]
    assert found["recipe"] == recipe_of(case.recipe), f"run python -m benchmarks.runs {name} --keep"
    assert found["steps"] == case.goal.steps
    assert found["sides"].keys() == case.sides.keys()
    assert {name.partition("_seed")[0] for name in found["runs"]} == case.sides.keys()
    for run in found["runs"].values():
        assert len(run["reward"]) == case.goal.steps


@pytest.mark.parametrize(
    ("name", "side", "seeds"),
    [
        ("demo", "padded", 10),
        ("subagents", "padded", 3),
        ("every_call", "shared", 3),
        *(
            ("source_job", f"{estimator}_{side}", 3)
            for estimator in ("grpo", "gae")
            for side in ("lcm", "prompt")
        ),
    ],
)
def test_every_seed_learns(name, side, seeds):
    runs = runs_of(kept(f"runs {name}")["runs"], side)
    assert len(runs) == seeds
    for run in runs:
        learning = Learning(run["reward"], CASES[name].goal)
        assert learning.learned is True, (name, learning.last, learning.lowest)
        assert run.get("sharing_factor", 2) > 1.8
