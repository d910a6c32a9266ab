"""Several runs in one picture: what they earned, and how many optimizer steps and pads that took."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape
from rich.table import Table
from yaml import YAMLError

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import GRAD_NORM, OPTIMIZER_STEPS, PAD_ROWS_TOTAL
from verl_padding.runs.charts import OURS, STOCK, new_figure, save_chart, start_at_zero, whole_numbers
from verl_padding.runs.learning import LAST
from verl_padding.runs.report import METRICS, ROLLOUTS, read_metrics, read_rows
from verl_padding.stock.rule import StockRule

CONFIG = Path("hydra", ".hydra", "config.yaml")
"""Where Hydra leaves a run's config with ``hydra.run.dir=<run>/hydra``, which the recipes' run scripts set."""

LINES = ("-", "--", ":", "-.")
"""Of runs of one kind, which have one colour."""
WIDEST_NAME = 80
"""Letters in a line of a picture's legend."""


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """One run, step by step; every list has one entry per step.

    Attributes:
        name: name of its folder; of several runs, as much of the path as tells them apart.
        is_stock: whether stock verl's trainer ran.
        steps: numbers of the training steps.
        reward: mean reward of the sessions.
        optimizer_steps: those of the actor per epoch; in a stock run they follow from its rows and its config.
        grad_norm: verl's ``actor/grad_norm``, the mean over the optimizer steps of the step.
        pads: rows that were added.
        real_rows: rows of the sessions.
    """

    name: str
    is_stock: bool
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
            PaddingDataError: one of them is missing, or cannot be read.
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
        is_stock = not any(PAD_ROWS_TOTAL in metrics[step] for step in steps)
        if not is_stock:
            # A step that trained only the critic has none of the actor.
            optimizer_steps = [int(metrics[step].get(OPTIMIZER_STEPS.format(update=ACTOR), 0)) for step in steps]
            pads = [int(metrics[step].get(PAD_ROWS_TOTAL, 0)) for step in steps]
        else:
            rule = _stock_rule(folder)
            optimizer_steps = [rule.optimizer_steps(rows[step].real) for step in steps]
            pads = [rows[step].dumped_pads for step in steps]
        return cls(
            name=folder.resolve().name,
            is_stock=is_stock,
            steps=steps,
            reward=[rows[step].reward for step in steps],
            optimizer_steps=optimizer_steps,
            grad_norm=[metrics[step].get(GRAD_NORM, math.nan) for step in steps],
            pads=pads,
            real_rows=[rows[step].real for step in steps],
        )

    @classmethod
    def read_all(cls, folders: Sequence[Path]) -> list[RunCurves]:
        """Reads several runs, whose names differ.

        Raises:
            PaddingDataError: one of them cannot be read, or is named twice.
        """
        places = [folder.resolve() for folder in folders]
        for number, folder in enumerate(folders):
            if places[number] in places[:number]:
                raise PaddingDataError(f"{folder}: named twice. Name each run once.")
        runs = [cls.read(folder) for folder in folders]
        return [replace(run, name=name) for run, name in zip(runs, telling_tails(places), strict=True)]


def telling_tails(places: Sequence[Path]) -> list[str]:
    """Of each path, the last parts that no other path ends in, as few as possible; no two paths are alike.

    >>> telling_tails([Path("/runs/a/out"), Path("/runs/b/out"), Path("/runs/c")])
    ['a/out', 'b/out', 'c']
    """
    tails = []
    for number, place in enumerate(places):
        others = [other.parts for at, other in enumerate(places) if at != number]
        parts = place.parts
        length = next(
            length for length in range(1, len(parts) + 1) if all(other[-length:] != parts[-length:] for other in others)
        )
        tails.append(str(Path(*parts[-length:])))
    return tails


def _stock_rule(folder: Path) -> StockRule:
    try:
        config = OmegaConf.load(folder / CONFIG)
    except FileNotFoundError as error:
        raise PaddingDataError(
            f"{folder / CONFIG}: not there, but the optimizer steps of a run of stock verl follow from its config. "
            f"Start the run with hydra.run.dir={folder / CONFIG.parts[0]}."
        ) from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise PaddingDataError(f"{folder / CONFIG}: cannot be read ({error}). Name the folder of a run.") from error
    try:
        return StockRule.of_config(config)  # type: ignore[arg-type]
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise PaddingDataError(
            f"{folder / CONFIG}: not the config of a verl job ({error}). Name the folder of a run of "
            "verl.trainer.main_ppo."
        ) from error


def table_of(runs: Sequence[RunCurves]) -> Table:
    """The runs side by side, in numbers."""
    table = Table()
    table.add_column("run", overflow="fold")
    headings = ("steps", f"reward,\nlast {LAST}", "optimizer steps\nper batch", "grad norm,\nmean", "pads /\nreal rows")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        fewest, most = min(run.optimizer_steps), max(run.optimizer_steps)
        norms = [norm for norm in run.grad_norm if not math.isnan(norm)]
        table.add_row(
            escape(run.name),
            str(len(run.steps)),
            f"{fmean(run.reward[-LAST:]):.3f}",
            str(fewest) if fewest == most else f"{fewest} to {most}",
            f"{fmean(norms):.3g}" if norms else "-",
            f"{sum(run.pads) / sum(run.real_rows):.1%}",
        )
    return table


def draw(runs: Sequence[RunCurves], path: Path) -> None:
    """Writes the four curves of every run, one below the other. Runs of stock verl have one colour, and padded ones.

    Raises:
        PaddingDataError: the picture cannot be written.
    """
    panels = {
        "mean reward\nof a session": "reward",
        "optimizer steps\nper batch": "optimizer_steps",
        "gradient norm": "grad_norm",
        "pads": "pads",
    }
    figure, axes = new_figure(nrows=len(panels), figsize=(7, 8), sharex=True, layout="constrained")
    for axis, (label, attribute) in zip(axes, panels.items(), strict=True):
        for run, look in zip(runs, _looks(runs), strict=True):
            axis.plot(run.steps, getattr(run, attribute), linewidth=1.2, **look)
        axis.set_ylabel(label)
        start_at_zero(axis)
        axis.spines[["top", "right"]].set_visible(False)
    names = ["\n".join(textwrap.wrap(run.name, WIDEST_NAME)) for run in runs]
    figure.legend(axes[0].lines, names, loc="outside upper left", frameon=False)
    axes[-1].set_xlabel("step")
    whole_numbers(axes[-1].xaxis)
    save_chart(figure, path)


def _looks(runs: Sequence[RunCurves]) -> list[dict[str, str]]:
    """Colour and line of each run."""
    lines = {True: cycle(LINES), False: cycle(LINES)}
    return [{"color": STOCK if run.is_stock else OURS, "linestyle": next(lines[run.is_stock])} for run in runs]
