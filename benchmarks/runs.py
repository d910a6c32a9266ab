"""Recipes over several seeds on this machine's CPU: what their runs earn, and the optimizer steps
and pads they take.

    python -m benchmarks.runs demo|subagents|every_call|every_call_thinking|source_job [--only NAME]
    [--keep]

A seed has a model, data and draws of its own. A run takes five to twenty minutes on two cores; one
that is in its folder is not run again, so that a benchmark can be stopped and started, and two can
run at a time (``--only``).

*source_job* is the job that asked for padding: 45 prompts, 8 sessions each, mini-batches of 15
prompts, two ranks; the task of recipes/context_reset with GRPO, and with GAE and a critic.
``learning.py`` has many more runs of it, in one process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import typer
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import Keep, busy_cores, report
from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, StockRule, read_curves
from verl_padding.cli.demo import ASSETS, HYDRA, demo_job, empty_folder
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.every_call import job as every_call
from verl_padding.recipes.subagents import job as subagents
from verl_padding.record.run_files import CONFIG, ROLLOUTS

LAST = 10
"""Steps at the end of a run that count as its result."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a recipe is known to reach."""

    reward: float
    """Of a session: the mean over the last steps has to reach it."""
    floor: float
    """No step may fall below it once a step has reached ``reward``."""
    steps: int
    """That the recipe is made for; a shorter run need not have learned."""


CONTEXT_RESET = Goal(reward=0.95, floor=0.9, steps=60)
SUBAGENTS = Goal(reward=0.6, floor=0.5, steps=60)
EVERY_CALL = Goal(reward=0.75, floor=0.6, steps=60)


class Learning:
    """The mean reward of a session at each step of a run (one at least), against its recipe's goal.

    Attributes:
        last: the mean over the last `LAST` steps.
        reached: the first step, counted from 1, that reaches the goal; None for none.
        lowest: the lowest reward of a step from there on.
        learned: whether the goal was reached and held; None if it was not, but the run was too
            short, or if the reward of a step is unknown (NaN).
    """

    def __init__(self, rewards: Sequence[float], goal: Goal):
        self.last = fmean(rewards[-LAST:])
        self.reached = next(
            (step for step, reward in enumerate(rewards, start=1) if reward >= goal.reward), None
        )
        self.lowest = None if self.reached is None else min(rewards[self.reached - 1 :])
        held = self.last >= goal.reward and self.lowest is not None and self.lowest >= goal.floor
        is_unknown = any(map(math.isnan, rewards)) or not (held or len(rewards) >= goal.steps)
        self.learned = None if is_unknown else held


LAST_STEPS = {
    "update_s": "timing_s/update_actor",
    "log_prob_s": "timing_s/old_log_prob",
    "step_s": "timing_s/step",
    "rows_of_a_session": "padding/session/rows/mean",
    "sharing_factor": "padding/actor/sharing_factor",
}
"""Figures of a run that are medians over its last steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, and what is run of it."""

    recipe: str
    goal: Goal
    make_job: Callable[[Path, int], list[str]]
    """Makes what a seed's job needs in a folder, and gives its overrides."""
    sides: dict[str, tuple[str, ...]]
    """Further overrides of each side."""
    seeds: int = 3

    def overrides(self, folder: Path, side: str, seed: int) -> list[str]:
        """Of one run, with all that it needs made in its folder."""
        flags = self.sides[side]
        seed_flags = (
            [f"padding.seed={seed}"] if any(flag.startswith("+padding=") for flag in flags) else []
        )
        return [*self.make_job(folder, seed), *flags, *seed_flags]


def tiny(make: Callable[..., list[str]], **options: Any) -> Callable[[Path, int], list[str]]:
    """A recipe's tiny job, its assets below the run's folder."""
    return lambda folder, seed: make(folder / ASSETS, seed=seed, **options)


PROMPTS, MINI_BATCH, SESSIONS, RANKS = 45, 15, 8, 2
SOURCE_JOB = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    f"actor_rollout_ref.rollout.n={SESSIONS}",
    f"trainer.n_gpus_per_node={RANKS}",
    # One token is a whole reply; the rate is higher than the recipe's, whose mini-batches are
    # smaller.
    "data.max_response_length=1",
    "actor_rollout_ref.actor.optim.lr=4e-3",
)
CRITIC = (
    "algorithm.adv_estimator=gae",
    f"critic.ppo_mini_batch_size={MINI_BATCH}",
    "critic.optim.lr=4e-3",
)
FLAGS = {
    "stock": (),
    "lcm": ("+padding=lcm",),
    "prompt": ("+padding=prompt",),
    "fast": ("+padding=fast",),
}
PLANNED = ("+padding=prompt", "padding.packer=plan")
TREES = (*PLANNED, "padding.sharing=on")
CASES = {
    "demo": Case(
        recipe="context_reset_tiny",
        goal=CONTEXT_RESET,
        make_job=lambda folder, seed: demo_job(folder, seed=seed),
        sides={"padded": ()},
        seeds=10,
    ),
    "subagents": Case(
        recipe="subagents_tiny",
        goal=SUBAGENTS,
        make_job=tiny(subagents.tiny_job),
        sides={
            "padded": ("+padding=prompt",),
            "role": ("+padding=prompt", "padding.baseline=role"),
            "stock": (),
        },
    ),
    "every_call": Case(
        recipe="every_call_tiny",
        goal=EVERY_CALL,
        make_job=tiny(every_call.tiny_job),
        sides={"shared": TREES, "unshared": PLANNED},
    ),
    "every_call_thinking": Case(
        recipe="every_call_tiny",
        goal=replace(EVERY_CALL, steps=40),
        make_job=tiny(every_call.tiny_job, thinking=True),
        sides={"trees": TREES},
    ),
    "source_job": Case(
        recipe="context_reset_tiny",
        # The mean of the last ten batches, in which they still learn; they end above 0.85.
        goal=Goal(reward=0.6, floor=0.5, steps=24),
        make_job=tiny(context_reset.tiny_job),
        sides={
            f"{estimator}_{side}": (*SOURCE_JOB, *settings, *flags)
            for (estimator, settings), (side, flags) in product(
                {"grpo": (), "gae": CRITIC}.items(), FLAGS.items()
            )
        },
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
        job = [
            *case.overrides(folder, side, seed),
            f"trainer.total_training_steps={case.goal.steps}",
            f"trainer.rollout_data_dir={folder / ROLLOUTS}",
            f"hydra.run.dir={folder / HYDRA}",
        ]
        started = time.monotonic()
        if code := run_local_job(job, folder=folder):
            raise RuntimeError(f"the job ended with code {code}; its output is in {folder / LOG}")
        figures = figures_of(folder, case.goal) | {"seconds": round(time.monotonic() - started)}
        result.write_text(json.dumps(figures) + "\n")
    return dict(json.loads(result.read_text()))


def figures_of(folder: Path, goal: Goal) -> dict[str, Any]:
    """Of a run: what it earned, and rows, pads and optimizer steps of each batch."""
    found, _ = read_curves(folder)
    curves = {name: list(curve.values()) for name, curve in found.items()}
    rewards, rows = curves[SESSION_REWARD], list(map(int, curves[REAL_ROWS_TOTAL]))
    learning, steps = Learning(rewards, goal), list(map(int, curves[ACTOR_STEPS]))
    if (
        fewest := "padding/actor/mini_batch_real_rows/min"
    ) not in curves:  # stock verl: all pads are behind the rows
        config = OmegaConf.load(folder / CONFIG)
        assert isinstance(config, DictConfig)
        mini_rows = StockRule.from_config(config).actor_rows
        curves[fewest] = [
            max(0, n - (taken - 1) * mini_rows) for n, taken in zip(rows, steps, strict=True)
        ]
    last = {
        name: round(median(curves[key][-LAST:]), 3)
        for name, key in LAST_STEPS.items()
        if key in curves
    }
    return last | {
        "last": learning.last,
        "lowest": learning.lowest,
        "learned": learning.learned,
        "reward": [round(reward, 4) for reward in rewards],
        "optimizer_steps": steps,
        "fewest_real_rows": list(map(int, curves[fewest])),
        "rows": rows,
        "pads": list(map(int, curves[PAD_ROWS_TOTAL])),
        "grad_norm": [round(norm, 5) for norm in curves["actor/grad_norm"]],
    }


def runs_of(runs: dict[str, dict[str, Any]], side: str) -> Sequence[dict[str, Any]]:
    """Those of a side."""
    return [run for name, run in runs.items() if name.startswith(f"{side}_seed")]


def main(
    case: str,
    only: str = "",
    out: Path = Path("outputs"),
    keep: Keep = False,
) -> None:
    """Runs a recipe, each side and seed whose name begins with ``only``."""
    busy, it, runs = busy_cores(), CASES[case], {}
    for side, seed in product(it.sides, range(it.seeds)):
        if (name := f"{side}_seed{seed}").startswith(only):
            runs[name] = run_of(it, side, seed, (out / case / name).resolve())
    said = {"recipe": recipe_of(it.recipe), "sides": it.sides, "steps": it.goal.steps}
    report(f"runs {case}", said | {"runs": runs}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
