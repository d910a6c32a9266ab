"""A line for each step that verl has logged, while a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import (
    GRAD_NORM,
    OPTIMIZER_STEPS,
    PAD_ROWS_TOTAL,
    REAL_ROWS_MIN,
    REAL_ROWS_TOTAL,
    ROW_REWARD,
    STEP_SECONDS,
)
from verl_padding.runs.report import METRICS, read_metrics

COLUMNS = {
    "row reward": (ROW_REWARD, ".3f"),
    "rows": (REAL_ROWS_TOTAL, ".0f"),
    "pads": (PAD_ROWS_TOTAL, ".0f"),
    "steps taken": (OPTIMIZER_STEPS.format(update=ACTOR), ".0f"),
    "fewest rows": (REAL_ROWS_MIN.format(update=ACTOR), ".0f"),
    "grad norm": (GRAD_NORM, ".3f"),
    "seconds": (STEP_SECONDS, ".1f"),
}
"""Heading -> (metric, format) in the line of a step. Only real rows are counted; "fewest rows" are those of the
smallest optimizer step."""


class StepLines:
    """Lines of the steps of a job, each once, below a heading.

    Args:
        folder: where verl writes its ``metrics.jsonl``. One of an earlier job, which verl will empty, is not told.

    Attributes:
        told: steps that were told by now.
    """

    def __init__(self, folder: Path):
        self.told = 0
        self._folder = folder
        self._columns: dict[str, tuple[str, str]] = {}
        self._seen = self._look()

    def new(self) -> Iterator[str]:
        """Lines of the steps that were logged since the last call; the heading comes before the first."""
        found = self._look()
        if found == self._seen:
            return
        self._seen = found
        for step, data in read_metrics(self._folder)[self.told :]:
            if not self.told:
                # Stock verl has no metrics of padding: no columns that stay empty.
                self._columns = {
                    heading: column
                    for heading, column in COLUMNS.items()
                    if column[0] in data or not column[0].startswith("padding/")
                }
                yield "  ".join(["step", *self._columns])
            self.told += 1
            yield self._line_of(step, data)

    def _line_of(self, step: int, data: dict[str, Any]) -> str:
        cells = [f"{step:>4}"]
        for heading, (metric, form) in self._columns.items():
            text = format(data[metric], form) if metric in data else "-"
            cells.append(text.rjust(len(heading)))
        return "  ".join(cells)

    def _look(self) -> tuple[int, int] | None:
        """What changes when verl writes its file, or makes it anew."""
        path = self._folder / METRICS
        if not path.exists():
            return None
        found = path.stat()
        return found.st_size, found.st_mtime_ns
