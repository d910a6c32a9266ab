"""Whether a trained model learns with the plug-in as with stock verl, and in what time:
recipes/guess with SmolLM2-135M-Instruct on this machine's CPU.

    python -m benchmarks.guess [--steps 10] [--seeds 3] [--only fast_seed0] [--keep]
    python -m benchmarks.guess --picture FILE

All runs take hours on two idle cores, stock verl's longer than ours; both sides of a seed come
before the next seed. If interrupted, run it again to continue: each run resumes from its last
checkpoint. After each run the points of all are in ``points.json``, which ``--keep`` keeps;
``--picture`` draws them, or those that are kept.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate, product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from benchmarks.results import Keep, busy_cores, kept, report
from benchmarks.runs import add_stock_counts, recipe_of
from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, read_curves
from verl_padding.job.metric_names import (
    ALL_COMPUTED_TOKENS,
    PAD_ROWS_TOTAL,
    REAL_ROWS_TOTAL,
    SAVED_TOKENS,
)
from verl_padding.on_cpu.launch import run_command
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.row_keys import session_of_key
from verl_padding.recipes.guess.smollm2 import make_smollm2
from verl_padding.record.run_files import METRICS, ROLLOUTS, dumps_in, read_dump

SCRIPT = Path(__file__).parent.parent / "recipes/guess/run_cpu.sh"
Points = dict[str, list[float]]
"""Of a run: name of a point -> its value in each batch."""
SIDES = {"stock": "", "fast": "+padding=fast"}
POINTS = {
    "reward": SESSION_REWARD,
    "rows": REAL_ROWS_TOTAL,
    "pads": PAD_ROWS_TOTAL,
    "optimizer_steps": ACTOR_STEPS,
    "seconds": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "log_prob_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "grad_norm": "actor/grad_norm",
    "tokens": "perf/total_num_tokens",
    "computed_tokens": ALL_COMPUTED_TOKENS,
    **{name.split("/")[2]: name for name in SAVED_TOKENS},
}
"""Name of a point of a step -> the metric."""


def train(
    folder: Path, model: Path, *, side: str, seed: int, steps: int, overrides: list[str]
) -> None:
    """Runs a side and seed up to a step, from where it was stopped.

    Raises:
        RuntimeError: the job failed.
    """
    if len(points_of(folder)["won"]) >= steps:
        return
    told = {"OUT": folder / "run", "MODEL": model, "SEED": seed, "PADDING": SIDES[side]}
    # also if this environment is not activated
    told["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["env", *(f"{name}={value}" for name, value in told.items()), "bash", str(SCRIPT)]
    job = [f"trainer.total_training_steps={steps}", *overrides]
    if code := run_command([*command, *job], folder=folder):
        raise RuntimeError(f"the job ended with code {code}; its output is in {folder}")


def points_of(folder: Path) -> Points:
    """The points of a run so far, a value for each step; of a step that was repeated, the last."""
    run = folder / "run"
    if starts := sorted(run.glob("metrics/*.jsonl")):
        (run / METRICS).write_bytes(b"".join(path.read_bytes() for path in starts))
    curves, _ = read_curves(run)
    add_stock_counts(curves, run)
    curves["won"] = {int(path.stem): share_won(path) for path in dumps_in(run / ROLLOUTS)}
    steps = sorted(curves.get(SESSION_REWARD, {}))
    return {
        name: [round(curves[metric][step], 4) for step in steps]
        for name, metric in ({"won": "won"} | POINTS).items()
        if metric in curves
    }


def share_won(dump: Path) -> float:
    """Sessions of a step that have found the number: only those have a reward of 1."""
    rows = read_dump(dump, uid=str, score=float)
    rewards = {
        session_of_key(row["uid"]): row["score"]
        for row in rows
        if not row["uid"].startswith(PAD_UID_PREFIX)
    }
    return sum(reward == 1.0 for reward in rewards.values()) / len(rewards)


def by_side(runs: dict[str, Points]) -> dict[str, list[Points]]:
    """The runs of each side, up to the last batch that all runs have."""
    batches = min(len(run["won"]) for run in runs.values())
    return {
        side: [
            {point: values[:batches] for point, values in run.items()}
            for name, run in runs.items()
            if name.startswith(side)
        ]
        for side in SIDES
    }


def mean_won(runs: list[Points]) -> list[str]:
    """The share of won sessions in each batch, over the seeds."""
    return [f"{mean(shares):.2f}" for shares in zip(*(run["won"] for run in runs), strict=True)]


def behind(sides: dict[str, list[Points]]) -> list[float]:
    """By what share of the last batch's sessions ``fast`` has won less, of each seed."""
    return [
        round(stock["won"][-1] - fast["won"][-1], 2)
        for stock, fast in zip(sides["stock"], sides["fast"], strict=True)
    ]


def model_tokens(runs: list[Points]) -> float:
    """Tokens that reach the model, with those of pads. Stock verl computes a log-prob pass and an
    update of all rows."""
    return sum(
        sum(run.get("computed_tokens", [2 * tokens for tokens in run["tokens"]])) for run in runs
    )


def training_seconds(runs: list[Points]) -> list[float]:
    """Of the log-prob pass and the update of each batch."""
    return [
        sum(seconds)
        for run in runs
        for seconds in zip(run["log_prob_s"], run["update_s"], strict=True)
    ]


def draw(runs: dict[str, Points], path: Path) -> None:
    """Won sessions by batches, optimizer steps and minutes: a line for each run, up to the last
    batch that all runs have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    looks = {"stock": ("stock verl", "tab:orange"), "fast": ("+padding=fast", "tab:blue")}
    labels = ("batches", "optimizer steps", "minutes")
    lines = [(looks[side], run) for side, found in by_side(runs).items() for run in found]
    for (label, color), run in lines:
        minutes = [seconds / 60 for seconds in run["seconds"]]
        # A step's sessions are those of the policy before it.
        spent_on_axes = ([1.0] * len(minutes), run["optimizer_steps"], minutes)
        for axis, spent in zip(axes, spent_on_axes, strict=True):
            begun = [0, *accumulate(spent)][: len(run["won"])]
            axis.plot(begun, run["won"], color=color, label=label)
    for axis, spent_label in zip(axes, labels, strict=True):
        axis.set(xlabel=spent_label, ylim=(0, 1), xlim=(0, None))
    axes[0].set_ylabel("share of sessions won")
    handles, names = axes[0].get_legend_handles_labels()
    one_of = dict(zip(names, handles, strict=True))
    figure.legend(one_of.values(), one_of.keys(), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Of all runs.")] = None,
    steps: int = 10,
    seeds: int = 3,
    only: str = "",
    out: Path = Path("outputs/guess_learning"),
    picture: Path | None = None,
    keep: Keep = False,
) -> None:
    """Runs each seed and side whose name begins with ``only``."""
    points, name = out.resolve() / "points.json", "guess"
    if picture is not None:
        draw(json.loads(points.read_text()) if points.exists() else kept(name)["runs"], picture)
        return
    busy, model = busy_cores(), out.resolve() / "smollm2"
    make_smollm2(model)
    runs = {f"{side}_seed{seed}": (side, seed) for seed, side in product(range(seeds), SIDES)}
    found: dict[str, Any] = {}
    for run, (side, seed) in runs.items():
        if run.startswith(only):
            folder = points.parent / run
            train(folder, model, side=side, seed=seed, steps=steps, overrides=overrides or [])
        if any((points.parent / run).glob("run/metrics/*")):
            found[run] = points_of(points.parent / run)
        points.write_text(json.dumps(found) + "\n")
    said = {"recipe": recipe_of("guess_real"), "sides": SIDES, "overrides": overrides or []}
    report(name, said | {"runs": found}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
