"""Runs side by side: what they earned, and how many optimizer steps and pads that took."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Self, cast

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import GRAD_NORM, OPTIMIZER_STEPS, PAD_ROWS_TOTAL
from verl_padding.runs.charts import OURS, STOCK, new_figure, save_chart, start_at_zero
from verl_padding.runs.report import LAST, METRICS, ROLLOUTS, dumps_in, logged_rows, read_metrics, read_step
from verl_padding.stock.padding import StockRule

CONFIG = Path("hydra", ".hydra", "config.yaml")
"""Where Hydra leaves a run's config with ``hydra.run.dir=<run>/hydra``, which the recipes' run scripts set."""
LINES = ("-", "--", ":", "-.")  # of runs of one kind, which have one colour
PANELS = {
    "mean reward\nof a session": "reward",
    "optimizer steps\nper batch": "optimizer_steps",
    "gradient norm": "grad_norm",
    "pads": "pads",
}


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """One run, step by step; every list has one entry per step, NaN for what is not known."""

    name: str
    is_stock: bool  # whether stock verl's trainer ran
    steps: list[int]
    reward: list[float]  # mean of the sessions
    optimizer_steps: list[float]  # the actor's per epoch; in a stock run they follow from its rows and its config
    grad_norm: list[float]
    pads: Sequence[float]
    real_rows: list[int]

    @classmethod
    def read(cls, folder: Path, most_steps: int | None = None) -> Self:
        """Reads what a run has left: metrics, dumps of steps whose rows these do not tell, and a stock run's config.

        Args:
            most_steps: the first so many steps are read; None for all of which a reward is known.

        Raises:
            PaddingDataError: no step has.
        """
        metrics, dumps = dict(read_metrics(folder)), {int(path.stem): path for path in dumps_in(folder / ROLLOUTS)}
        logged = {step: found for step, data in metrics.items() if (found := logged_rows(step, data))}
        steps = sorted(logged.keys() | metrics.keys() & dumps.keys())[:most_steps]
        rows = {step: logged.get(step) or read_step(dumps[step]) for step in steps}
        if not steps:
            raise PaddingDataError(
                f"{folder}: has no step with both metrics and a rollout dump. Start the run with trainer.logger="
                f"[console,file], VERL_FILE_LOGGER_PATH={folder / METRICS}, trainer.rollout_data_dir="
                f"{folder / ROLLOUTS} and hydra.run.dir={folder / CONFIG.parts[0]}, as the recipes' run scripts do."
            )
        is_stock = not any(PAD_ROWS_TOTAL in metrics[step] for step in steps)
        run = cls(
            name=str(folder),
            is_stock=is_stock,
            steps=steps,
            reward=[rows[step].reward for step in steps],
            # A step that trained only the critic has none of the actor.
            optimizer_steps=[_whole(metrics[step].get(OPTIMIZER_STEPS.format(update=ACTOR), 0)) for step in steps],
            grad_norm=[metrics[step].get(GRAD_NORM, math.nan) for step in steps],
            pads=[
                rows[step].dumped_pads if is_stock else _whole(metrics[step].get(PAD_ROWS_TOTAL, 0)) for step in steps
            ],
            real_rows=[rows[step].real for step in steps],
        )
        return run.with_steps_of(stock_rule_of(folder)) if is_stock else run

    def with_steps_of(self, rule: StockRule) -> Self:
        """The same, with the optimizer steps that stock verl takes of its rows."""
        return replace(self, optimizer_steps=[rule.optimizer_steps(real) for real in self.real_rows])

    def by_stock_rule(self, rule: StockRule) -> Self:
        """What stock verl's rule makes of the same numbers of rows; what they would earn is not known."""
        unknown = [math.nan] * len(self.steps)
        pads = [rule.padded_rows(real) - real for real in self.real_rows]
        run = self.with_steps_of(rule)
        return replace(run, name="verl's rule", is_stock=True, reward=unknown, grad_norm=unknown, pads=pads)


def stock_rule_of(folder: Path) -> StockRule:
    return StockRule.of_config(cast("DictConfig", OmegaConf.load(folder / CONFIG)))


def table_of(runs: Sequence[RunCurves]) -> Table:
    """The runs side by side, in numbers."""
    table = Table()
    table.add_column("run", overflow="fold")
    headings = ("steps", f"reward,\nlast {LAST}", "optimizer steps\nper batch", "grad norm,\nmean", "pads /\nreal rows")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        taken = sorted(_known(run.optimizer_steps))
        both = [pair for pair in zip(run.pads, run.real_rows, strict=True) if not math.isnan(pair[0])]
        pads, real = map(sum, zip(*both, strict=True)) if both else (math.nan, 1)
        table.add_row(
            escape(run.name),
            str(len(run.steps)),
            _mean(run.reward[-LAST:], ".3f"),
            " to ".join(map(str, dict.fromkeys((taken[0], taken[-1])))) if taken else "-",
            _mean(run.grad_norm, ".3g"),
            _mean([pads / real], ".1%"),
        )
    return table


def _mean(numbers: Sequence[float], form: str) -> str:
    known = _known(numbers)
    return format(fmean(known), form) if known else "-"


def _whole(number: float) -> float:
    return number if math.isnan(number) else int(number)


def _known(numbers: Sequence[float]) -> list[float]:
    return [number for number in numbers if not math.isnan(number)]


def draw(runs: Sequence[RunCurves], path: Path) -> None:
    """Writes the four curves of every run, one below the other. Runs of stock verl have one colour, and padded ones."""
    figure, axes = new_figure(nrows=len(PANELS), figsize=(7, 8), sharex=True)
    for axis, (label, attribute) in zip(axes, PANELS.items(), strict=True):
        for run, look in zip(runs, _looks(runs), strict=True):
            axis.plot(run.steps, getattr(run, attribute), linewidth=1.2, **look)
        axis.set_ylabel(label)
        start_at_zero(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(axes[0].lines, [run.name for run in runs], loc="outside upper left", frameon=False)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    save_chart(figure, path)


def _looks(runs: Sequence[RunCurves]) -> list[dict[str, str]]:
    lines = {True: cycle(LINES), False: cycle(LINES)}
    return [{"color": STOCK if run.is_stock else OURS, "linestyle": next(lines[run.is_stock])} for run in runs]
