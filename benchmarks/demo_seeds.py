"""The demo with several seeds, each a model, data and draws of its own: what it learns, and whether it keeps it.

``python -m benchmarks.demo_seeds`` takes ten to twenty minutes a seed on two cores. Overrides show what another recipe
would do: ``python -m benchmarks.demo_seeds --out outputs/other actor_rollout_ref.actor.optim.lr=2e-3``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.learning import CONTEXT_RESET as GOAL
from benchmarks.recipe_runs import recipe_of, run_of, show_runs, spread_of
from benchmarks.results import AsJson, Keep, busy_cores, report
from verl_padding.cli.demo import demo_job

RECIPE = "context_reset_tiny"


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides of the recipe.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = GOAL.steps,
    stock: Annotated[bool, typer.Option("--stock", help="verl's own trainer, too.")] = False,
    out: Annotated[Path, typer.Option(help="Where the runs go; one that is there is not run again.")] = Path(
        "outputs/demo_seeds"
    ),
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Runs the demo for each seed."""
    busy = busy_cores()
    runs, figures = {}, {}
    for trainer in ("padded", "stock") if stock else ("padded",):
        for seed in range(seeds):
            folder = (out / f"{trainer}_seed{seed}").resolve()
            job = partial(_job, stock=trainer == "stock", seed=seed, overrides=overrides or [])
            runs[folder.name] = run_of(job, folder, recipe=RECIPE, steps=steps, goal=GOAL)
        figures[trainer] = spread_of([run for name, run in runs.items() if name.startswith(trainer)])
    show_runs(f"verl-padding demo, {steps} steps: mean reward of a session", runs, GOAL)
    record = {"recipe": recipe_of(RECIPE), "overrides": overrides or [], "steps": steps}
    report(record | figures | {"runs": runs}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


def _job(folder: Path, *, stock: bool, seed: int, overrides: list[str]) -> list[str]:
    return [*demo_job(folder, stock=stock, seed=seed), *overrides]


if __name__ == "__main__":
    typer.run(main)
