"""Runs of the recipes over several seeds, as last measured: of the recipes as they are, and as good
as promised."""

import pytest

from benchmarks.learning import Learning
from benchmarks.results import kept
from benchmarks.runs import CASES, recipe_of, runs_of

NOT_RUN = {"source_job": {"grpo_steps", "gae_steps"}}
"""Sides of a benchmark that have no kept figures yet."""


def kept_sides(name: str) -> dict[str, tuple[str, ...]]:
    """The sides of a benchmark that its kept figures have to have, and no others."""
    sides, left_out = CASES[name].sides, NOT_RUN.get(name, set())
    assert left_out <= sides.keys()
    return {side: flags for side, flags in sides.items() if side not in left_out}


@pytest.mark.parametrize("name", CASES)
def test_kept_runs_are_of_the_recipe_as_it_is(name):
    found, case = kept(f"runs {name}"), CASES[name]
    assert found["recipe"] == recipe_of(case.recipe), f"run python -m benchmarks.runs {name} --keep"
    assert found["steps"] == case.goal.steps
    assert found["sides"].keys() == kept_sides(name).keys()
    assert {name.partition("_seed")[0] for name in found["runs"]} == kept_sides(name).keys()
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
