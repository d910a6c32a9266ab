"""Recipes over several seeds on this machine's CPU: what their runs earn, and the optimizer steps
and pads they take.

    python -m benchmarks.runs demo|subagents|source_job [--only NAME] [--keep]

A seed has a model, data and draws of its own. A run takes four to twenty minutes on two cores; one
that is in its folder is not run again, so that a benchmark can be stopped and started, and two can
run at a time (``--only``).

*source_job* is the job that asked for padding: 45 prompts, 8 sessions each, mini-batches of 15
prompts, two ranks; the task of recipes/context_reset. ``learning.py`` has many more runs of it, in
one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import Keep, report
from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, Curves, read_curves
from verl_padding.cli.demo import ASSETS, HYDRA, demo_job, empty_folder
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.job.role_engine import has_critic
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.plan import padded_rows
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.subagents import job as subagents
from verl_padding.record.run_files import CONFIG, ROLLOUTS, ROW_REWARD, dumps_in, read_step

LAST = 10
"""Steps at the end of a run that count as its result."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, and what is run of it."""

    recipe: str
    steps: int
    make_job: Callable[[Path, int], list[str]]
    """Makes what a seed's job needs in a folder, and gives its overrides."""
    sides: dict[str, tuple[str, ...]]
    """Further overrides of each side."""
    seeds: int = 3


SOURCE_JOB = (
    "data.train_batch_size=45",
    "actor_rollout_ref.actor.ppo_mini_batch_size=15",
    "actor_rollout_ref.rollout.n=8",
    "trainer.n_gpus_per_node=2",
    # One token is a whole reply; the rate is higher than the recipe's, whose mini-batches are
    # smaller.
    "data.max_response_length=1",
    "actor_rollout_ref.actor.optim.lr=4e-3",
)
CASES = {
    "demo": Case(
        recipe="context_reset_tiny",
        steps=60,
        make_job=lambda folder, seed: demo_job(folder, seed=seed),
        sides={"padded": ()},
        seeds=10,
    ),
    "subagents": Case(
        recipe="subagents_tiny",
        steps=60,
        make_job=lambda folder, seed: subagents.tiny_job(folder / ASSETS, seed=seed),
        sides={
            "padded": ("+padding=prompt",),
            "role": ("+padding=prompt", "padding.baseline=role"),
            "stock": (),
        },
    ),
    "source_job": Case(
        recipe="context_reset_tiny",
        steps=24,
        make_job=lambda folder, seed: context_reset.tiny_job(folder / ASSETS, seed=seed),
        sides={side: (*SOURCE_JOB, f"+padding={side}") for side in ("lcm", "prompt", "fast")},
    ),
}


def recipe_of(name: str) -> dict[str, Any]:
    """The recipe's config, as it is now: figures are of one recipe, and a changed one needs new
    figures."""
    config = OmegaConf.to_container(
        OmegaConf.load(f"{Path(__file__).parent.parent}/configs/recipe/{name}.yaml")
    )
    assert isinstance(config, dict)
    return {str(section): values for section, values in config.items()}


def run_of(case: Case, side: str, seed: int, folder: Path) -> dict[str, Any]:
    """Runs a job in ``folder``, or reads the figures of the one that was run there.

    Raises:
        RuntimeError: the job failed.
        PaddingDataError: the folder holds something else.
    """
    result = folder / "result.json"
    if not result.exists():
        empty_folder(folder)
        flags = case.sides[side]
        job = [
            *case.make_job(folder, seed),
            *flags,
            *([f"padding.seed={seed}"] if flags else []),
            f"trainer.total_training_steps={case.steps}",
            f"trainer.rollout_data_dir={folder / ROLLOUTS}",
            f"hydra.run.dir={folder / HYDRA}",
        ]
        if code := run_local_job(job, folder=folder):
            raise RuntimeError(f"the job ended with code {code}; its output is in {folder / LOG}")
        result.write_text(json.dumps(figures_of(folder)) + "\n")
    return dict(json.loads(result.read_text()))


def figures_of(folder: Path) -> dict[str, Any]:
    """Of a run: what it earned, and rows, pads and optimizer steps of each batch."""
    curves, _ = read_curves(folder)
    add_stock_counts(curves, folder)
    rewards = list(curves[SESSION_REWARD].values())
    counts = {"optimizer_steps": ACTOR_STEPS, "rows": REAL_ROWS_TOTAL, "pads": PAD_ROWS_TOTAL}
    return {
        "last": fmean(rewards[-LAST:]),
        "reward": [round(reward, 4) for reward in rewards],
        **{name: list(map(int, curves[metric].values())) for name, metric in counts.items()},
    }


def runs_of(runs: dict[str, dict[str, Any]], side: str) -> Sequence[dict[str, Any]]:
    """Those of a side."""
    return [run for name, run in runs.items() if name.startswith(f"{side}_seed")]


def main(case: str, only: str = "", out: Path = Path("outputs"), keep: Keep = False) -> None:
    """Runs a recipe, each side and seed whose name begins with ``only``."""
    it, runs = CASES[case], {}
    for side, seed in product(it.sides, range(it.seeds)):
        if (name := f"{side}_seed{seed}").startswith(only):
            runs[name] = run_of(it, side, seed, (out / case / name).resolve())
    said = {"recipe": recipe_of(it.recipe), "sides": it.sides, "steps": it.steps}
    report(f"runs {case}", said | {"runs": runs}, keep=keep)


def add_stock_counts(curves: Curves, folder: Path) -> None:
    """Adds the pads and optimizer steps of a run of stock verl, which logs neither, to its curves:
    they follow from its rollout dumps and its config."""
    if PAD_ROWS_TOTAL in curves or not curves:
        return
    config = OmegaConf.load(folder / CONFIG)
    assert isinstance(config, DictConfig)
    n, ranks = int(config.actor_rollout_ref.rollout.n), int(config.trainer.n_gpus_per_node)
    sections = [config.actor_rollout_ref.actor, *([config.critic] if has_critic(config) else [])]
    sizes = [int(section.ppo_mini_batch_size) * n for section in sections]
    # Its dumps hold its pads: 100 rows with mini-batches of 64 are padded to 128, and take two.
    paths = [path for path in dumps_in(folder / ROLLOUTS) if int(path.stem) in curves[ROW_REWARD]]
    dumped = {rows.step: rows for rows in map(read_step, paths)}
    curves[REAL_ROWS_TOTAL] = {step: rows.real for step, rows in dumped.items()}
    curves[PAD_ROWS_TOTAL] = {step: rows.dumped_pads for step, rows in dumped.items()}
    curves[ACTOR_STEPS] = {
        step: padded_rows(rows.real, ranks, *sizes) // sizes[0] for step, rows in dumped.items()
    }


if __name__ == "__main__":
    typer.run(main)
