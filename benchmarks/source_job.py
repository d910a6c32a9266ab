"""The job that asked for padding: 45 prompts, 8 sessions each, mini-batches of 15 prompts, two ranks.

    python -m benchmarks.source_job [--only NAME] [--keep] [--json]

Stock verl, ``+padding=lcm`` and ``+padding=prompt`` learn the task of recipes/context_reset, whose sessions are 1 to 4
rows, with GRPO, and with GAE and a critic, on three seeds: 18 runs of a few minutes each. A run that is kept in its
folder is not run again, so that the benchmark can be stopped and started; two at a time are ``--only grpo`` and
``--only gae``. With ``--picture`` nothing is run: the curves of the figures that are kept are drawn.

What an optimizer step holds is read off the loss masks that reach verl's worker (``tests/end_to_end/probe.py``), on all
sides alike.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks.charts import OURS, OURS_LIGHT, STOCK, new_figure, save_chart, start_at_zero
from benchmarks.learning import Goal
from benchmarks.recipe_runs import RESULT, recipe_of, run_of, show_runs, spread_of
from benchmarks.results import AsJson, Keep, busy_cores, kept, report, show
from verl_padding.cli.demo import ASSETS
from verl_padding.job.metric_names import GRAD_NORM, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.recipes.context_reset.job import tiny_job
from verl_padding.runs.curves import read_curves

RECIPE = "context_reset_tiny"
PROMPTS, MINI_BATCH, SESSIONS, RANKS = 45, 15, 8, 2
JOB = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    f"actor_rollout_ref.rollout.n={SESSIONS}",
    f"trainer.n_gpus_per_node={RANKS}",
    # One token is a whole reply; the rate is higher than the recipe's, whose mini-batches are smaller.
    "data.max_response_length=1",
    "actor_rollout_ref.actor.optim.lr=4e-3",
)
ESTIMATORS = {
    "grpo": (),
    "gae": (
        "algorithm.adv_estimator=gae",
        f"critic.ppo_mini_batch_size={MINI_BATCH}",
        "critic.optim.lr=4e-3",
    ),
}
SIDES = {"stock": (), "lcm": ("+padding=lcm",), "prompt": ("+padding=prompt",)}
LOOKS = {
    "stock": {"color": STOCK, "label": "stock verl"},
    "lcm": {"color": OURS_LIGHT, "label": "+padding=lcm"},
    "prompt": {"color": OURS, "label": "+padding=prompt"},
}
GOAL = Goal(reward=0.6, floor=0.5, steps=24)
"""Set after the first runs: the mean of the last ten batches, in which they still learn; they end above 0.85."""


def main(
    only: Annotated[str, typer.Option(help="Run only those whose name has this in it; read the others.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = GOAL.steps,
    out: Annotated[Path, typer.Option(help="Where the runs go; one that is there is not run again.")] = Path(
        "outputs/source_job"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Draws the curves of what is kept there, and runs nothing.")
    ] = None,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Runs each side for each seed, with and without a critic."""
    if picture is not None:
        draw(kept("source_job")["runs"], picture)
        return
    busy = busy_cores()
    runs = {}
    for seed, estimator, side in product(range(seeds), ESTIMATORS, SIDES):
        folder = (out / f"{estimator}_{side}_seed{seed}").resolve()
        if only in folder.name or (folder / RESULT).exists():
            runs[folder.name] = watched_run(folder, estimator=estimator, side=side, seed=seed, steps=steps)
    show_runs(f"{PROMPTS} prompts of {SESSIONS} sessions, {steps} steps: mean reward of a session", runs, GOAL)
    figures = {}
    for kind in (f"{estimator}_{side}" for estimator, side in product(ESTIMATORS, SIDES)):
        if of_kind := [run for name, run in runs.items() if name.startswith(f"{kind}_")]:
            figures[kind] = spread_of(of_kind) | over_all_steps(of_kind)
    columns = ("last ten: median", "optimizer steps of a batch", "real rows of a step, fewest", "pads / rows", "norm")
    show(
        "all seeds",
        ["", *columns],
        [
            [
                kind,
                record["last"]["median"],
                " to ".join(map(str, record["optimizer_steps"])),
                record["fewest_real_rows"],
                record["pads_per_row"],
                record["grad_norm"],
            ]
            for kind, record in figures.items()
        ],
    )
    record = {"recipe": recipe_of(RECIPE), "job": list(JOB), "estimators": ESTIMATORS, "steps": steps, "seeds": seeds}
    report(record | figures | {"runs": runs}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


def watched_run(folder: Path, *, estimator: str, side: str, seed: int, steps: int) -> dict[str, Any]:
    """A run with what its optimizer steps held, read off the workers; every list has one entry a batch."""
    from tests.end_to_end import probe
    from tests.end_to_end.jobs import ACTOR, read_probe

    notes = folder.parent / "probe" / folder.name  # beside the folder, of which a run is told what it may hold
    if not (folder / RESULT).exists():
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir(parents=True)
    watched = {probe.FOLDER: str(notes), "VERL_USE_EXTERNAL_MODULES": "tests.end_to_end.probe"}
    job = partial(_job, flags=(*ESTIMATORS[estimator], *SIDES[side]), seed=seed)
    root = str(Path(__file__).parent.parent)
    with mock.patch.dict(os.environ, watched | {"PYTHONPATH": root}):
        run = run_of(job, folder, recipe=RECIPE, steps=steps, goal=GOAL)
    curves, _ = read_curves(folder)
    rows, pads, norms = ([*curves[name].values()] for name in (REAL_ROWS_TOTAL, PAD_ROWS_TOTAL, GRAD_NORM))
    held = steps_of_batches(
        [step.real_rows for step in read_probe(notes, torn=False)["optimizer_steps"][ACTOR]], map(int, rows)
    )
    steps_taken = [len(real) for real in held]
    return run | {
        "optimizer_steps": [min(steps_taken), max(steps_taken)],
        "optimizer_steps_taken": steps_taken,
        "fewest_real_rows": [min(real) for real in held],
        "rows": [int(n) for n in rows],
        "pads": [int(n) for n in pads],
        "grad_norm": [round(norm, 5) for norm in norms],
    }


def steps_of_batches(real_rows: Sequence[int], rows: Iterable[int]) -> list[list[int]]:
    """Real rows of the optimizer steps of each batch; a step without any belongs to the batch before it.

    >>> steps_of_batches([4, 4, 1, 0, 4, 2], [9, 6])
    [[4, 4, 1, 0], [4, 2]]

    Raises:
        ValueError: the steps do not train each row of each batch once.
    """
    left, held = list(real_rows), []
    for n in rows:
        taken: list[int] = []
        while left and (sum(taken) < n or not left[0]):
            taken.append(left.pop(0))
        held.append(taken)
        if sum(taken) != n:
            raise ValueError(f"batch {len(held)}: {n} rows, and steps of {taken}")
    if left:
        raise ValueError(f"steps of {left} belong to no batch")
    return held


def over_all_steps(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of a kind: optimizer steps of a batch, rows of a step, pads and gradient norms."""
    taken = [steps for run in runs for steps in run["optimizer_steps_taken"]]
    return {
        "optimizer_steps": sorted({min(taken), max(taken)}),
        "fewest_real_rows": min(rows for run in runs for rows in run["fewest_real_rows"]),
        "pads_per_row": round(sum(sum(run["pads"]) for run in runs) / sum(sum(run["rows"]) for run in runs), 4),
        "grad_norm": round(fmean(norm for run in runs for norm in run["grad_norm"]), 4),
    }


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Reward of a session and optimizer steps by batch, with and without a critic: a thin line a run."""
    figure, axes = new_figure(nrows=2, ncols=2, figsize=(9, 5), sharex=True, sharey="row", height_ratios=(2, 1))
    for (top, bottom), (estimator, title) in zip(
        axes.T, (("grpo", "GRPO"), ("gae", "GAE, with a critic")), strict=True
    ):
        for side, look in LOOKS.items():
            of_side = [run for name, run in runs.items() if name.startswith(f"{estimator}_{side}_")]
            for number, run in enumerate(of_side):
                label = look["label"] if not number else None
                batches = range(1, len(run["reward"]) + 1)
                top.plot(batches, run["reward"], color=look["color"], label=label, linewidth=1.2)
                bottom.plot(batches, run["optimizer_steps_taken"], color=look["color"], linewidth=1.2)
        top.set_title(title)
        bottom.set_xlabel("batch")
        start_at_zero(top)
        start_at_zero(bottom)
    axes[0][0].set_ylabel("mean reward of a session")
    axes[1][0].set_ylabel("optimizer steps")
    axes[0][1].legend(frameon=False, loc="lower right")
    save_chart(figure, path)


def _job(folder: Path, *, flags: Sequence[str], seed: int) -> list[str]:
    of_plan = [f"padding.seed={seed}"] if any(flag.startswith("+padding=") for flag in flags) else []
    return [*tiny_job(folder / ASSETS, seed=seed), *JOB, *flags, *of_plan]


if __name__ == "__main__":
    typer.run(main)
