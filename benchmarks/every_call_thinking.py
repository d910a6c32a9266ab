"""The recipe every_call with a model that thinks, on several seeds with trees, and on the first one also without.

``python -m benchmarks.every_call_thinking`` takes some four minutes a run on two cores. The chat template leaves out
what was thought in earlier turns, so that no row is the beginning of another one: chains find nothing to share. Seconds
are those of a step's update and of its pass without training, in the last steps, where sessions are longest.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.every_call_seeds import RECIPE, UNSHARED, last_steps
from benchmarks.learning import EVERY_CALL as GOAL
from benchmarks.recipe_runs import recipe_of, run_of
from benchmarks.results import AsJson, Keep, busy_cores, report, show
from verl_padding.cli.demo import ASSETS
from verl_padding.recipes.every_call.job import THINKING, tiny_job

SIDES = ("trees", "chains", "off")


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many with trees, from 0 on.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    out: Annotated[Path, typer.Option(help="Where the runs go; one that is there is not run again.")] = Path(
        "outputs/every_call_thinking"
    ),
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Runs the recipe for each seed."""
    busy = busy_cores()
    runs = {}
    for side, seed in [("trees", seed) for seed in range(seeds)] + [(side, 0) for side in SIDES[1:]]:
        folder = (out / f"{side}_seed{seed}").resolve()
        job = partial(_job, seed=seed, sharing=side)
        runs[folder.name] = run_of(job, folder, recipe=RECIPE, steps=steps, goal=GOAL) | last_steps(folder)
    columns = ["sharing_factor", "rows_of_a_session", "update_s", "log_prob_s", "step_s", "first", "last"]
    lines = [[name, *(run[column] for column in columns)] for name, run in runs.items()]
    show(f"recipes/every_call, a model that thinks, {steps} steps", ["run", *columns], lines)
    record = {"recipe": recipe_of(RECIPE), "overrides": list(THINKING), "steps": steps, "runs": runs}
    report(record, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


def _job(folder: Path, *, seed: int, sharing: str) -> list[str]:
    job = tiny_job(folder / ASSETS, seed=seed, thinking=True)
    return [*job, *UNSHARED, f"padding.sharing={sharing}", f"padding.seed={seed}"]


if __name__ == "__main__":
    typer.run(main)
