"""The recipe subagents, padded and with stock verl, on the same seeds: what holds over them, and what does not.

``python -m benchmarks.subagents_seeds`` takes some fifteen minutes a run on two cores.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.learning import SUBAGENTS as GOAL
from benchmarks.recipe_runs import recipe_of, run_of, show_runs, spread_of
from benchmarks.results import AsJson, Keep, busy_cores, report
from verl_padding.cli.demo import ASSETS
from verl_padding.recipes.subagents.job import tiny_job

RECIPE = "subagents_tiny"
FLAGS = {"padded": "+padding=prompt", "stock": None}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = GOAL.steps,
    out: Annotated[Path, typer.Option(help="Where the runs go; one that is there is not run again.")] = Path(
        "outputs/subagents_seeds"
    ),
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Runs the recipe for each seed, with the flag and without."""
    busy = busy_cores()
    runs = {}
    for seed in range(seeds):
        for trainer, flag in FLAGS.items():
            folder = (out / f"{trainer}_seed{seed}").resolve()
            runs[folder.name] = run_of(
                partial(_job, seed=seed, flag=flag), folder, recipe=RECIPE, steps=steps, goal=GOAL
            )
    figures = {trainer: spread_of([run for name, run in runs.items() if name.startswith(trainer)]) for trainer in FLAGS}
    show_runs(f"recipes/subagents, {steps} steps: mean reward of a session", runs, GOAL)
    record = {"recipe": recipe_of(RECIPE), "steps": steps}
    report(record | figures | {"runs": runs}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


def _job(folder: Path, *, seed: int, flag: str | None) -> list[str]:
    return [*tiny_job(folder / ASSETS, seed=seed), *([flag, f"padding.seed={seed}"] if flag else [])]


if __name__ == "__main__":
    typer.run(main)
