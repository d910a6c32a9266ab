"""Runs of the recipes over several seeds, as last measured: of the recipes as they are, and as good
as promised."""

import pytest

from benchmarks.results import kept
from benchmarks.runs import CASES, recipe_of, runs_of


@pytest.mark.parametrize("name", CASES)
def test_kept_runs_are_of_the_recipe_as_it_is(name):
    found, case = kept(f"runs {name}"), CASES[name]
    assert found["recipe"] == recipe_of(case.recipe), f"run python -m benchmarks.runs {name} --keep"
    assert found["steps"] == case.steps
    assert {side: tuple(flags) for side, flags in found["sides"].items()} == case.sides
    for side in case.sides:
        runs = runs_of(found["runs"], side)
        assert len(runs) == case.seeds
        assert all(len(run["reward"]) == case.steps for run in runs)


@pytest.mark.parametrize(
    ("name", "side", "reward"),
    [("demo", "padded", 0.95), ("subagents", "padded", 0.6)]
    + [("source_job", side, 0.6) for side in CASES["source_job"].sides],
)
def test_every_seed_learns(name, side, reward):
    assert all(run["last"] >= reward for run in runs_of(kept(f"runs {name}")["runs"], side))
