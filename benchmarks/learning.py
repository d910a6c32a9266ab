"""What a job's mini-batches do to learning: the source job's task with verl's rule, and with the
strategies, over seeds, learning rates, two estimators and two tasks.

    nice -n 19 python -m benchmarks.learning            # goes on where it was stopped
    python -m benchmarks.learning --picture FILE

A run (``learning_run.py``) is a line of ``learning.jsonl``. The task *two symbols* is that of
recipes/context_reset, in which one reply to both symbols earns 0.41: fast learners may stay there.
In *one symbol*, one reply is always right.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.results import kept
from benchmarks.runs import LAST, SOURCE_JOB, runs_of
from verl_padding.recipes.context_reset.job import tiny_job

FILE = Path(__file__).with_suffix(".jsonl")
BATCHES, SEEDS = 24, 16
TASKS = ("two symbols", "one symbol")
CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic.ppo_mini_batch_size=15",
    "critic.optim.lr=4e-3",
)
ESTIMATORS = {"grpo": (), "gae": CRITIC}
RATES = (1.0, 2.0, 0.5)
"""Factors of the learning rate, the first one first."""
SIDES = {
    "stock verl": (),
    "lcm": ("+padding=lcm",),
    "prompt": ("+padding=prompt",),
    "prompt, by rows": ("+padding=prompt", "padding.optimizer_steps=by_rows"),
}


class Kind(NamedTuple):
    """What all seeds of a side have in common."""

    task: str
    estimator: str
    rate: float
    side: str


Runs = dict[Kind, dict[int, dict[str, Any]]]
"""The runs of each kind, by seed."""


def kinds() -> Iterator[Kind]:
    for estimator, rate, task, side in product(ESTIMATORS, RATES, TASKS, SIDES):
        yield Kind(task, estimator, rate, side)


def all_runs() -> Iterator[tuple[Kind, int]]:
    """Rate by rate and seed by seed, so that a study that is stopped has as many of each side."""
    for rate, seed, estimator, task, side in product(RATES, range(SEEDS), ESTIMATORS, TASKS, SIDES):
        yield Kind(task, estimator, rate, side), seed


def run(kind: Kind, seed: int, assets: Path) -> dict[str, Any]:
    """Curves of one run: reward in thousandths, rows and optimizer steps of each batch."""
    import pandas as pd
    import torch

    import benchmarks.ray_and_queue  # noqa: F401  (before anything of verl: it chooses its platform)
    from benchmarks.learning_run import LearningRun

    torch.set_num_threads(1)
    job = dict(each.split("=", 1) for each in tiny_job(assets, seed=seed))
    data = pd.read_parquet(job["data.train_files"])
    paths = [row["ground_truth"] for row in data["reward_model"]]
    if kind.task == "one symbol":
        paths = ["1" * len(path) for path in paths]
    model = Path(job["actor_rollout_ref.model.path"])
    # One job for all seeds: it is composed once.
    settings = (*SOURCE_JOB, *ESTIMATORS[kind.estimator], *SIDES[kind.side])
    job_of_all = (*tiny_job(assets), *settings)
    learning = LearningRun(job_of_all, model, paths, seed=seed, rate=kind.rate, batches=BATCHES)
    batches = [learning.train_batch() for _ in range(BATCHES)]
    return {
        **kind._asdict(),
        "seed": seed,
        "reward": [round(1000 * batch["reward"]) for batch in batches],
        **{name: [batch[name] for batch in batches] for name in ("rows", "steps")},
        "pads": sum(batch["pads"] for batch in batches),
    }


def kept_runs() -> Runs:
    """Those that were run so far."""
    runs: Runs = {kind: {} for kind in kinds()}
    for line in FILE.read_text().splitlines() if FILE.exists() else ():
        found = json.loads(line)
        runs[Kind(*(found[name] for name in Kind._fields))][found["seed"]] = found
    return runs


def last(found: dict[str, Any]) -> float:
    """Mean reward of the last batches."""
    return fmean(found["reward"][-LAST:]) / 1000


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """How often the means of two sides differ as much if each seed's two values are exchanged or
    not, over all 2^seeds ways: a permutation test in pairs.

    >>> p_value([1, 2, 3], [0, 1, 2])
    0.25
    """
    difference = np.subtract(one, other)
    signs = np.array([*product((1, -1), repeat=len(difference))])
    sums = np.abs(signs @ difference)
    return float((sums >= abs(difference.sum()) * (1 - 1e-9)).mean())


def compared(runs: Runs, kind: Kind) -> dict[str, Any]:
    """Medians of a side over the seeds, and whether it differs from stock verl at the same rate, in
    the seeds that both have."""
    stock, own = runs[kind._replace(side="stock verl")], runs[kind]
    both = sorted(own.keys() & stock.keys())
    return {
        "last": median(map(last, own.values())),
        "mean": fmean(map(last, own.values())),
        "steps": median(sum(each["steps"]) for each in own.values()),
        "p": p_value([last(own[seed]) for seed in both], [last(stock[seed]) for seed in both]),
    }


def cases_behind(runs: Runs, side: str) -> int:
    """How many cases of task, estimator and rate a side ends behind stock verl, with p < 0.05."""
    own_kinds = [kind for kind in kinds() if kind.side == side]
    found = [
        (compared(runs, kind), compared(runs, kind._replace(side="stock verl")))
        for kind in own_kinds
    ]
    return sum(each["p"] < 0.05 and each["mean"] < stock["mean"] for each, stock in found)


def pairs_level(runs: Runs, side: str, rate: float) -> str:
    """In how many pairs of seeds a side at a rate ends no lower than stock verl at the configured
    one: ``3 of 4``."""
    pairs = [
        (last(found), last(runs[kind._replace(side="stock verl", rate=1.0)][seed]))
        for kind in kinds()
        if (kind.side, kind.rate) == (side, rate)
        for seed, found in runs[kind].items()
    ]
    return f"{sum(own >= stock for own, stock in pairs)} of {len(pairs)}"


def beside_whole_jobs(runs: Runs) -> float:
    """Largest difference between a run and a whole job of its settings and seed, in the reward of
    the last batches. Stock verl, whose jobs draw the names of their prompts, and jobs with a
    critic, which begins with other numbers, have no run of their seed."""
    jobs = kept("runs source_job")["runs"]
    return max(
        abs(last(runs[Kind("two symbols", "grpo", 1.0, side)][seed]) - job["last"])
        for side, flag in {"lcm": "lcm", "prompt": "prompt", "prompt, by rows": "fast"}.items()
        for seed, job in enumerate(runs_of(jobs, flag))
    )


def draw(runs: Runs, path: Path) -> None:
    """Each run as a point, by task, estimator, rate and side; a line for the median of a side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(TASKS), len(ESTIMATORS), figsize=(9, 5), sharex=True, sharey=True, layout="constrained"
    )
    rates = sorted(RATES)
    for axis, (task, estimator) in zip(axes.flat, product(TASKS, ESTIMATORS), strict=True):
        axis.set(title=f"{task}, {estimator.upper()}", ylim=(0, 1.02))
        axis.set_xticks(range(len(rates)), [f"rate x {rate:g}" for rate in rates])
        for number, side in enumerate(SIDES):
            for place, rate in enumerate(rates):
                values = [*map(last, runs[Kind(task, estimator, rate, side)].values())]
                x = place + (number - 1.5) / 6
                spread = np.linspace(-0.05, 0.05, len(values))
                label = side if place == 0 else None
                axis.plot(x + spread, values, ".", color=f"C{number}", label=label)
                axis.hlines(median(values), x - 0.07, x + 0.07, color=f"C{number}")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SIDES)
    )
    figure.supylabel("mean reward of the last ten batches")
    figure.savefig(path, dpi=110)


def main(
    picture: Annotated[Path | None, typer.Option(help="Draw the kept runs, run none.")] = None,
) -> None:
    """Runs what has not been run."""
    done = kept_runs()
    if picture is not None:
        draw(done, picture)
        return
    with tempfile.TemporaryDirectory() as assets, FILE.open("a") as file:
        for kind, seed in all_runs():
            if seed not in done[kind]:
                file.write(json.dumps(run(kind, seed, Path(assets)), separators=(",", ":")) + "\n")
                file.flush()


if __name__ == "__main__":
    typer.run(main)
