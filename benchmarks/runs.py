"""Recipes over several seeds on this machine's CPU: what their runs earn, and the optimizer steps
and pads they take.

    python -m benchmarks.runs demo|subagents|every_call|every_call_thinking|source_job [--only NAME]
    [--keep]

A seed has a model, data and draws of its own. A run takes five to twenty minutes on two cores; one
that is in its folder is not run again, so that a benchmark can be stopped and started, and two can
run at a time (``--only``).

*source_job* is the job that asked for padding: 45 prompts, 8 sessions each, mini-batches of 15
prompts, two ranks; the task of recipes/context_reset with GRPO, and with GAE and a critic. Its side
*steps* is ``+padding=prompt`` with a third of the mini-batch, so as many steps as stock verl takes.
``--picture FILE`` draws its kept figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import typer
from omegaconf import DictConfig, OmegaConf

from benchmarks.learning import CONTEXT_RESET, EVERY_CALL, LAST, SUBAGENTS, Goal, Learning
from benchmarks.results import Keep, busy_cores, kept, report
from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, StockRule, read_curves
from verl_padding.cli.demo import ASSETS, HYDRA, demo_job, empty_folder
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_MIN, REAL_ROWS_TOTAL
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.every_call import job as every_call
from verl_padding.recipes.subagents import job as subagents
from verl_padding.record.run_files import CONFIG, ROLLOUTS

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
        of_plan = (
            [f"padding.seed={seed}"] if any(flag.startswith("+padding=") for flag in flags) else []
        )
        return [*self.make_job(folder, seed), *flags, *of_plan]


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
MORE_STEPS = MINI_BATCH // 3
"""Prompts of a mini-batch with which ``prompt`` takes as many steps as stock verl takes at most."""
FLAGS = {
    "stock": (),
    "lcm": ("+padding=lcm",),
    "prompt": ("+padding=prompt",),
    "steps": (
        "+padding=prompt",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MORE_STEPS}",
        f"critic.ppo_mini_batch_size={MORE_STEPS}",
    ),
}
PLANNED = ("+padding=prompt", "padding.packer=plan")
TREES = (*PLANNED, "padding.sharing=on")
CASES = {
    "demo": Case(
        recipe="context_reset_tiny",
        goal=CONTEXT_RESET,
        make_job=lambda folder, seed: demo_job(folder, stock=False, seed=seed),
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
        fewest := REAL_ROWS_MIN.format(update="actor")
    ) not in curves:  # stock verl: all pads are behind the rows
        config = OmegaConf.load(folder / CONFIG)
        assert isinstance(config, DictConfig)
        mini_rows = StockRule.of_config(config).actor_rows
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


DRAWN = {"reward": "mean reward of a session", "optimizer_steps": "optimizer steps"}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Reward of a session and optimizer steps by batch, with and without a critic: a thin line a
    run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2,
        2,
        figsize=(9, 5),
        sharex=True,
        sharey="row",
        height_ratios=(2, 1),
        layout="constrained",
    )
    looks = {"stock": ("stock verl", "tab:orange"), "lcm": ("+padding=lcm", "#aec7e8")}
    looks["prompt"] = ("+padding=prompt", "tab:blue")
    looks["steps"] = ("+padding=prompt, 9 steps", "tab:green")
    for column, (estimator, title) in enumerate(
        {"grpo": "GRPO", "gae": "GAE, with a critic"}.items()
    ):
        axes[0][column].set_title(title)
        for axis, (name, label) in zip(axes[:, column], DRAWN.items(), strict=True):
            for side, look in looks.items():
                for number, run in enumerate(runs_of(runs, f"{estimator}_{side}")):
                    batches = range(1, len(run["reward"]) + 1)
                    axis.plot(
                        batches,
                        run[name],
                        color=look[1],
                        label=None if number else look[0],
                        linewidth=1.2,
                    )
            axis.set(ylim=(0, None), ylabel=None if column else label)
    figure.legend(*axes[0][1].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel("batch")
    figure.savefig(path, dpi=120)


def runs_of(runs: dict[str, dict[str, Any]], side: str) -> Sequence[dict[str, Any]]:
    """Those of a side."""
    return [run for name, run in runs.items() if name.startswith(f"{side}_seed")]


def main(
    case: str,
    only: str = "",
    out: Path = Path("outputs"),
    picture: Path | None = None,
    keep: Keep = False,
) -> None:
    """Runs a recipe, each side and seed whose name begins with ``only``."""
    if picture is not None:
        draw(kept(f"runs {case}")["runs"], picture)
        return
    busy, it, runs = busy_cores(), CASES[case], {}
    for side, seed in product(it.sides, range(it.seeds)):
        if (name := f"{side}_seed{seed}").startswith(only):
            runs[name] = run_of(it, side, seed, (out / case / name).resolve())
    said = {"recipe": recipe_of(it.recipe), "sides": it.sides, "steps": it.goal.steps}
    report(f"runs {case}", said | {"runs": runs}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
