"""The recipe every_call with shared prefixes on several seeds, and on the first one also without: the same, slower.

``python -m benchmarks.every_call_seeds`` takes some eight minutes a run on two cores. Seconds are those of a step's
update and of its pass without training, in the last steps, where sessions are longest. With ``--picture`` nothing is
run: the curves of the runs that are kept are drawn.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.charts import OURS, OURS_LIGHT, new_figure, save_chart, start_at_zero
from benchmarks.learning import EVERY_CALL as GOAL
from benchmarks.learning import LAST
from benchmarks.recipe_runs import recipe_of, run_of, show_runs, spread_of
from benchmarks.results import AsJson, Keep, busy_cores, console, kept, report
from verl_padding.cli.demo import ASSETS
from verl_padding.recipes.every_call.job import tiny_job
from verl_padding.runs.run_files import read_metrics

RECIPE = "every_call_tiny"
UNSHARED = ("+padding=prompt", "padding.packer=plan")
FLAGS = {"shared": (*UNSHARED, "padding.sharing=chains"), "unshared": UNSHARED}
WITHOUT_MEMORY = 0.65
"""Reward of an agent that tries a random door each time (the recipe's README)."""
MEASURED = {
    "update_s": "timing_s/update_actor",
    "log_prob_s": "timing_s/old_log_prob",
    "step_s": "timing_s/step",
    "rows_of_a_session": "padding/session/rows/mean",
}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    unshared: Annotated[int, typer.Option(min=0, help="How many of them also without sharing.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = GOAL.steps,
    out: Annotated[Path, typer.Option(help="Where the runs go; one that is there is not run again.")] = Path(
        "outputs/every_call_seeds"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Draws the curves of what is kept there, and runs nothing.")
    ] = None,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Runs the recipe for each seed."""
    if picture is not None:
        draw(kept("every_call_seeds")["runs"], picture)
        return
    busy = busy_cores()
    runs = {}
    for side, flags in FLAGS.items():
        for seed in range(seeds if side == "shared" else unshared):
            folder = (out / f"{side}_seed{seed}").resolve()
            job = partial(_job, seed=seed, flags=flags)
            runs[folder.name] = run_of(job, folder, recipe=RECIPE, steps=steps, goal=GOAL) | last_steps(folder)
    figures = {"shared": spread_of([run for name, run in runs.items() if name.startswith("shared")])}
    show_runs(f"recipes/every_call, {steps} steps: mean reward of a session", runs, GOAL)
    for name, run in runs.items():
        console.print(f"{name}: {run['update_s']:.2f} s an update, {run['log_prob_s']:.2f} s a pass")
    record = {"recipe": recipe_of(RECIPE), "steps": steps}
    report(record | figures | {"runs": runs}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean reward of a session by step, a line for each run."""
    figure, axes = new_figure(figsize=(8, 3.6))
    for name, run in runs.items():
        side, _, seed = name.partition("_seed")
        look = {"color": OURS} if side == "shared" else {"color": OURS_LIGHT, "linestyle": "--"}
        label = f"seed {seed}" if side == "shared" else f"seed {seed}, without sharing"
        axes.plot(
            range(1, len(run["reward"]) + 1), run["reward"], label=label, alpha=max(0.25, 1 - 0.25 * int(seed)), **look
        )
    axes.axhline(WITHOUT_MEMORY, color="#bbbbbb", linewidth=1, label="a random door each time")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of a session")
    start_at_zero(axes)
    axes.legend(frameon=False)
    save_chart(figure, path)


def last_steps(folder: Path) -> dict[str, Any]:
    """Medians over the last steps."""
    metrics = [step for _, step in read_metrics(folder)[-LAST:]]
    factor = [step.get("padding/actor/sharing_factor", 1.0) for step in metrics]
    return {name: round(median(step[key] for step in metrics), 3) for name, key in MEASURED.items()} | {
        "sharing_factor": round(median(factor), 3)
    }


def _job(folder: Path, *, seed: int, flags: tuple[str, ...]) -> list[str]:
    return [*tiny_job(folder / ASSETS, seed=seed), *flags, f"padding.seed={seed}"]


if __name__ == "__main__":
    typer.run(main)
