"""Several runs in one picture: what they earned, and how many optimizer steps and pads that took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from verl_padding.errors import PaddingDataError
from verl_padding.runs.learning import LAST
from verl_padding.runs.report import METRICS, ROLLOUTS, read_metrics, read_rows
from verl_padding.stock.rule import StockRule
from verl_padding.verl_job.calls import ACTOR
from verl_padding.verl_job.metric_names import GRAD_NORM, OPTIMIZER_STEPS, PAD_ROWS_TOTAL

CONFIG = Path("hydra", ".hydra", "config.yaml")
"""Where Hydra leaves a run's config with ``hydra.run.dir=<run>/hydra``, which the recipes' run scripts set."""


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """One run, step by step; every list has one entry per step.

    Attributes:
        name: name of its folder.
        steps: numbers of the training steps.
        reward: mean reward of the sessions.
        optimizer_steps: those of the actor per epoch; in a stock run they follow from its rows and its config.
        grad_norm: verl's ``actor/grad_norm``, the mean over the optimizer steps of the step.
        pads: rows that were added.
        real_rows: rows of the sessions.
    """

    name: str
    steps: list[int]
    reward: list[float]
    optimizer_steps: list[int]
    grad_norm: list[float]
    pads: list[int]
    real_rows: list[int]

    @classmethod
    def read(cls, folder: Path) -> RunCurves:
        """Reads what a run has left: metrics, rollout dump, config.

        Raises:
            PaddingDataError: one of them is missing.
        """
        metrics, rows = dict(read_metrics(folder)), {rows.step: rows for rows in read_rows(folder)}
        for found, name in ((metrics, METRICS), (rows, ROLLOUTS)):
            if not found:
                raise PaddingDataError(
                    f"{folder / name}: not there, or empty. Start the run with trainer.logger=[console,file], "
                    f"VERL_FILE_LOGGER_PATH={folder / METRICS} and trainer.rollout_data_dir={folder / ROLLOUTS}, as "
                    "the run scripts of the recipes do."
                )
        steps = sorted(metrics.keys() & rows.keys())
        if not steps:
            raise PaddingDataError(
                f"{folder}: its metrics and its dump have no step in common. Give each run its own folder."
            )
        if any(PAD_ROWS_TOTAL in metrics[step] for step in steps):
            # A step that trained only the critic has none of the actor.
            optimizer_steps = [int(metrics[step].get(OPTIMIZER_STEPS.format(update=ACTOR), 0)) for step in steps]
            pads = [int(metrics[step].get(PAD_ROWS_TOTAL, 0)) for step in steps]
        else:
            rule = _stock_rule(folder)
            optimizer_steps = [rule.optimizer_steps(rows[step].real) for step in steps]
            pads = [rows[step].dumped_pads for step in steps]
        return cls(
            name=folder.resolve().name,
            steps=steps,
            reward=[rows[step].reward for step in steps],
            optimizer_steps=optimizer_steps,
            grad_norm=[metrics[step].get(GRAD_NORM, math.nan) for step in steps],
            pads=pads,
            real_rows=[rows[step].real for step in steps],
        )


def _stock_rule(folder: Path) -> StockRule:
    try:
        config = OmegaConf.load(folder / CONFIG)
    except FileNotFoundError as error:
        raise PaddingDataError(
            f"{folder / CONFIG}: not there, but the optimizer steps of a run of stock verl follow from its config. "
            f"Start the run with hydra.run.dir={folder / CONFIG.parts[0]}."
        ) from error
    try:
        return StockRule.of_config(config)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise PaddingDataError(
            f"{folder / CONFIG}: not the config of a verl job ({error}). Name the folder of a run of "
            "verl.trainer.main_ppo."
        ) from error


def table_of(runs: Sequence[RunCurves]) -> Table:
    """The runs side by side, in numbers."""
    table = Table()
    table.add_column("run")
    headings = ("steps", f"reward, last {LAST}", "optimizer steps per batch", "grad norm, mean", "pads / real rows")
    for heading in headings:
        table.add_column(heading, justify="right")
    for run in runs:
        fewest, most = min(run.optimizer_steps), max(run.optimizer_steps)
        table.add_row(
            run.name,
            str(len(run.steps)),
            f"{fmean(run.reward[-LAST:]):.3f}",
            str(fewest) if fewest == most else f"{fewest} to {most}",
            f"{fmean(norm for norm in run.grad_norm if not math.isnan(norm)):.3g}",
            f"{sum(run.pads) / sum(run.real_rows):.1%}",
        )
    return table


def draw(runs: Sequence[RunCurves], path: Path) -> None:
    """Writes the four curves of every run, one below the other.

    Raises:
        PaddingDataError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "mean reward\nof a session": "reward",
        "optimizer steps\nper batch": "optimizer_steps",
        "gradient norm": "grad_norm",
        "pads": "pads",
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(7, 8), sharex=True)
    for axis, (label, attribute) in zip(axes, panels.items(), strict=True):
        for run in runs:
            axis.plot(run.steps, getattr(run, attribute), label=run.name, linewidth=1.2)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PaddingDataError(
            f"--picture {path}: cannot be written ({error}). Name another, such as runs.png."
        ) from error
    finally:
        plt.close(figure)
