"""Reward, rows, optimizer steps and pads of a job, from the files that verl wrote; and what stock verl would do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import OPTIMIZER_STEPS, PAD_ROWS_TOTAL, ROW_REWARD
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.row_keys import session_of_key
from verl_padding.runs.charts import NEITHER, OURS, STOCK, new_figure, save_chart, start_at_zero, whole_numbers
from verl_padding.stock.rule import StockRule

METRICS = "metrics.jsonl"
"""Written by verl's ``file`` logger: one line ``{"step": ..., "data": {metric: value}}`` per step."""
ROLLOUTS = "rollouts"
"""verl's ``trainer.rollout_data_dir``: ``<step>.jsonl`` with one line per row, whose ``uid`` is the row's key."""
LOG = "log"
"""All that a job has said."""
ACTOR_STEPS = OPTIMIZER_STEPS.format(update=ACTOR)


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows of one global step, as the rollout dump has them."""

    step: int
    reward: float
    """Mean reward of the sessions. verl's ``critic/score/mean`` is over rows, so long sessions count more often."""
    real: int
    dumped_pads: int
    """Pads among the dumped rows: none if only worker calls see pads."""


def read_metrics(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, metrics) of the training steps in ``folder``, as far as the job has come.

    Raises:
        PaddingDataError: the file cannot be read, or is not what verl's logger writes.
    """
    path = folder / METRICS
    if not os.path.exists(path):
        return []
    entries = list(_lines(path, "what verl's file logger writes", {"step": int, "data": dict}))
    return [(entry["step"], entry["data"]) for entry in entries if ROW_REWARD in entry["data"]]


def read_rows(folder: Path) -> list[StepRows]:
    """Rows of each step, from the rollout dump of a job that has ended.

    Raises:
        PaddingDataError: a file cannot be read, or is not a rollout dump.
    """
    return [_read_step(path) for path in dumps_in(folder / ROLLOUTS)]


def dumps_in(folder: Path) -> list[Path]:
    """The rollout dumps in a folder, ``<step>.jsonl``, in the order of their steps; none if there is no such folder.

    Raises:
        PaddingDataError: the folder cannot be read.
    """
    # os.path, for Path raises an error where a folder on the way cannot be searched.
    if not os.path.isdir(folder):
        return []
    try:
        dumps = [path for path in folder.iterdir() if is_named_as_dump(path)]
    except OSError as error:
        raise PaddingDataError(f"{folder}: cannot be read ({error.strerror}). Name another folder.") from error
    return sorted(dumps, key=lambda path: (int(path.stem), path.stem))


def is_named_as_dump(path: Path) -> bool:
    """Whether a file's name is one that verl gives to a rollout dump, ``<step>.jsonl``."""
    return path.suffix == ".jsonl" and path.stem.isdecimal()


def _read_step(path: Path) -> StepRows:
    rows = list(_lines(path, "a row of verl's rollout dump", {"uid": str, "score": (int, float)}))
    real = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]
    if not real:
        raise PaddingDataError(f"{path}: holds no row. Name the folder of a run that has ended.")
    # verl gives every row of a session the session's reward.
    rewards = {session_of_key(row["uid"]): row["score"] for row in real}
    return StepRows(
        step=int(path.stem), reward=fmean(rewards.values()), real=len(real), dumped_pads=len(rows) - len(real)
    )


def _lines(path: Path, what: str, needed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line, without a last line that is half written.

    Args:
        needed: keys of each object, with the types of their values.
    """
    try:
        # Not splitlines: a reply may hold a line separator that JSON leaves as it is, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise PaddingDataError(f"{path}: cannot be read ({error}). Name the folder of a run.") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), of) for key, of in needed.items()):
            raise PaddingDataError(
                f"{path}, line {number}: not {what}, an object with {' and '.join(needed)}. Name the folder of a run."
            )
        yield entry


def comparison_table(rows: Sequence[StepRows], metrics: Sequence[dict[str, Any]], stock: StockRule) -> Table:
    """This job beside what stock verl would do with the same numbers of rows."""
    table = Table(title="the same rows, padded by", title_style="bold")
    for column in ("", "optimizer steps per batch", "pads, mean", "pads / real rows"):
        table.add_column(column, justify="left" if not column else "right")
    real = [step.real for step in rows]
    stock_steps = [stock.optimizer_steps(n) for n in real]
    stock_pads = [stock.padded_rows(n) - n for n in real]
    if all(ACTOR_STEPS in step for step in metrics):
        ours_steps = [int(step[ACTOR_STEPS]) for step in metrics]
        ours_pads = [int(step[PAD_ROWS_TOTAL]) for step in metrics]
        table.add_row("verl_padding (measured)", *_cells(ours_steps, ours_pads, real))
    else:
        dumped = [step.dumped_pads for step in rows]
        table.add_row("stock verl (measured)", *_cells(stock_steps, dumped, real))
    table.add_row("stock verl (its rule)", *_cells(stock_steps, stock_pads, real))
    return table


def stock_step_table(rows: Sequence[StepRows], stock: StockRule) -> Table:
    """The steps of a run of stock verl, with what its metrics do not say."""
    table = Table(title="steps of stock verl, from its rollout dump and its rule", title_justify="left")
    for column in ("step", "reward of a session", "rows", "pads", "steps taken"):
        table.add_column(column, justify="right")
    for step in rows:
        cells = (step.step, f"{step.reward:.3f}", step.real, step.dumped_pads, stock.optimizer_steps(step.real))
        table.add_row(*map(str, cells))
    return table


def _cells(steps: Sequence[int], pads: Sequence[int], real: Sequence[int]) -> tuple[str, str, str]:
    low, high = min(steps), max(steps)
    span = str(low) if low == high else f"{low} to {high}"
    return span, f"{sum(pads) / len(pads):.1f}", f"{sum(pads) / sum(real):.1%}"


def draw_curves(
    path: Path, metrics: Sequence[tuple[int, dict[str, Any]]], rows: Sequence[StepRows], stock: StockRule
) -> None:
    """Writes the reward curve and, below it, rows and optimizer steps of each step, as a picture.

    Raises:
        PaddingDataError: the picture cannot be written.
    """
    figure, (top, middle, bottom) = new_figure(nrows=3, figsize=(7, 7), sharex=True, height_ratios=(2, 1, 1))
    steps = [step.step for step in rows]
    ours = [(step, data[ACTOR_STEPS]) for step, data in metrics if ACTOR_STEPS in data]
    top.plot(steps, [step.reward for step in rows], color=OURS if ours else STOCK)
    top.set_ylabel("mean reward of a session")
    middle.plot(steps, [step.real for step in rows], color=NEITHER)
    middle.set_ylabel("real rows")
    bottom.step(steps, [stock.optimizer_steps(step.real) for step in rows], color=STOCK, label="stock verl's rule")
    if ours:
        bottom.step(*zip(*ours, strict=True), color=OURS, label="verl_padding")
    bottom.set_ylabel("optimizer steps")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False)
    whole_numbers(bottom.xaxis)
    for axis in (top, middle, bottom):
        start_at_zero(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_chart(figure, path)
