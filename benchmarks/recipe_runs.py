"""Runs of a recipe on this machine's CPU, one a seed, and what each has earned."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from benchmarks.learning import LAST, Goal, Learning
from benchmarks.results import console, show
from verl_padding.cli.demo import HYDRA, empty_folder
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.runs.curves import ACTOR_STEPS, SESSION_REWARD, read_curves
from verl_padding.runs.run_files import ROLLOUTS

RESULT = "result.json"
RECIPES = Path(__file__).parent.parent / "configs" / "recipe"


def recipe_of(name: str) -> dict[str, Any]:
    """The recipe's config, as it is now: figures are of one recipe, and a changed one needs new figures."""
    config = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{name}.yaml"))
    assert isinstance(config, dict)
    return {str(section): values for section, values in config.items()}


def run_of(
    make_job: Callable[[Path], list[str]], folder: Path, *, recipe: str, steps: int, goal: Goal
) -> dict[str, Any]:
    """Runs a job of `steps` steps in ``folder``, or reads what the same job has left there, and tells what it earned.

    Args:
        make_job: makes what the job needs in a folder, and gives its overrides.
        recipe: name of the recipe that the overrides name.

    Returns: ``reward``, the mean reward of a session at each step; ``first``, ``last`` (over the last steps),
        ``reached``, ``lowest`` and ``learned`` as in `Learning`; ``optimizer_steps``, the fewest and the most of a
        batch; ``seconds``, start included.

    Raises:
        RuntimeError: the job failed, or another one has left its result there.
        PaddingDataError: the folder holds something else.
    """

    def job() -> dict[str, Any]:
        command = [
            *make_job(folder),
            f"trainer.total_training_steps={steps}",
            f"trainer.rollout_data_dir={folder / ROLLOUTS}",
            f"hydra.run.dir={folder / HYDRA}",
        ]
        return {"recipe": recipe_of(recipe), "command": command}

    kept = folder / RESULT
    if kept.exists():
        result = json.loads(kept.read_text())
        if result["job"] != job():
            raise RuntimeError(f"{kept} is of another job or recipe. Remove its folder, or give another one.")
        return dict(result["figures"])
    empty_folder(folder)
    run = job()
    started = time.monotonic()
    if code := run_local_job(run["command"], folder=folder):
        raise RuntimeError(f"the job ended with code {code}; its output is in {folder / LOG}")
    seconds = time.monotonic() - started
    curves, _ = read_curves(folder)
    rewards, taken = [*curves[SESSION_REWARD].values()], [int(steps) for steps in curves[ACTOR_STEPS].values()]
    learning = Learning(rewards, goal)
    figures = {
        "first": learning.first,
        "last": learning.last,
        "reached": learning.reached,
        "lowest": learning.lowest,
        "learned": learning.learned,
        "optimizer_steps": [min(taken), max(taken)],
        "seconds": round(seconds),
        "reward": [round(reward, 4) for reward in rewards],
    }
    kept.write_text(json.dumps({"job": run, "figures": figures}) + "\n")
    console.print(f"{folder.name}: {learning}")
    return figures


def show_runs(title: str, runs: dict[str, dict[str, Any]], goal: Goal) -> None:
    """A line a run, and one of all."""
    columns = ["run", "first", f"last {LAST}", f"step that reached {goal.reward}", "lowest after it", "steps per batch"]
    lines = [
        [
            name,
            run["first"],
            run["last"],
            *("-" if run[figure] is None else run[figure] for figure in ("reached", "lowest")),
            " to ".join(str(number) for number in sorted(set(run["optimizer_steps"]))),
            run["seconds"],
        ]
        for name, run in runs.items()
    ]
    show(title, [*columns, "seconds"], lines)


def spread_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the runs have in common: how many have learned, and the least, the median and the most of their rewards."""
    last = [run["last"] for run in runs]
    lowest = [run["lowest"] for run in runs if run["lowest"] is not None]
    return {
        "runs": len(runs),
        "learned": sum(run["learned"] is True for run in runs),
        "last": {"least": min(last), "median": median(last), "most": max(last)},
        "lowest": min(lowest) if lowest else None,
        "seconds": median(run["seconds"] for run in runs),
    }
