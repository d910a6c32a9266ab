"""The page that shows runs: one HTML file, which opens without a network."""

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, Curves
from verl_padding.job.metric_names import GRAD_NORM, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key
from verl_padding.record.step_file import Place, RecordedStep, or_null
from verl_padding.record.timings import MicroBatchTiming, timings_by_call
from verl_padding.version import __version__

FIRST_CHARTS = (
    SESSION_REWARD,
    REAL_ROWS_TOTAL,
    PAD_ROWS_TOTAL,
    ACTOR_STEPS,
    GRAD_NORM,
    "timing_s/step",
)
"""Curves that the page shows at first; others can be chosen."""
COLUMNS = (
    "tokens",
    "shared_tokens",
    "trained_tokens",
    "reward",
    "advantage",
    "weight",
    "staleness",
    "zero_advantage",
)
"""Numbers of a row, by the names of `RecordedRow`."""
SUMS = {
    "tokens": "tokens",
    "trained tokens": "trained_tokens",
    "zero-advantage rows": "zero_advantage",
}
"""Title in the table of steps -> the column whose sum it is."""


class Bar(NamedTuple):
    """A micro-batch on a rank."""

    rank: int
    mini_batch: int
    micro_batch: int | None
    """None where verl's packer cuts the micro-batches, in the workers."""
    start: float
    busy: float
    length: float
    """From its start until the slowest rank is ready: what is not busy is waiting."""
    rows: Sequence[int]
    pads: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The bars of a worker call, or of a layout, and what their lengths measure."""

    unit: str
    bars: Sequence[Bar]


def timed_chart(timings: Sequence[MicroBatchTiming]) -> Chart:
    """The timings of a call, by the clock."""
    # Clocks of nodes may differ by some milliseconds; the first start of all is 0.
    first_s = min(timing.start_s for timing in timings)
    bars = [
        Bar(
            timing.rank,
            timing.mini_batch,
            timing.micro_batch,
            timing.start_s - first_s,
            timing.seconds,
            timing.seconds,
            timing.rows,
            timing.pads,
            timing.tokens,
        )
        for timing in timings
    ]
    return Chart(unit="seconds", bars=bars)


def token_chart(update: RecordedStep, call: str) -> Chart:
    """The rows of each micro-batch, as long as their tokens; the record does not have the pads."""
    held: dict[Place, list[int]] = {}
    for row in update.rows:
        if call in row.places:
            held.setdefault(row.places[call], []).append(row.row)
    bars = []
    for place, rows in held.items():
        tokens = sum(update.rows[row].tokens for row in rows)
        bars.append(
            Bar(place.rank, place.mini_batch, place.micro_batch, 0, tokens, 0, rows, 0, tokens)
        )
    return Chart(unit="tokens of rows", bars=one_after_the_other(bars))


def one_after_the_other(bars: Sequence[Bar]) -> list[Bar]:
    """The bars with their starts and lengths: a micro-batch begins when all ranks are ready with
    the one before.

    Two ranks that are busy for 3 and 2, and then for 1 and 4, wait for 0 and 1, and then for 3 and
    0: both are ready at 3, and then at 7.
    """
    # verl's packer cuts local mini-batches in the workers: then a local mini-batch is one
    # micro-batch here.
    places = [(bar.mini_batch, bar.micro_batch or 0) for bar in bars]
    longest: dict[tuple[int, int], float] = {}
    for bar, at in zip(bars, places, strict=True):
        longest[at] = max(longest.get(at, 0), bar.busy)
    starts, end = {}, 0.0
    for at in sorted(longest):
        starts[at], end = end, end + longest[at]
    return [
        bar._replace(start=starts[at], length=longest[at])
        for bar, at in zip(bars, places, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A local update of a run, as the page shows it."""

    run: str
    update: RecordedStep
    texts: Mapping[str, Any]
    """Of a row's key: its input, its output, and where it branches off the row that it shares
    with."""

    @property
    def name(self) -> str:
        """Its title."""
        number = self.update.update
        return f"Step {self.update.step}" + (f", update {number}" if number else "")

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Those of :data:`COLUMNS`; none where rows are not recorded."""
        rows = self.update.rows
        return {name: [getattr(row, name) for row in rows] for name in COLUMNS if rows}

    @property
    def charts(self) -> dict[str, Chart]:
        """Bars of each worker call, by the clock where it was timed."""
        update = self.update
        timed = timings_by_call(update.timings)
        charts = {call: timed_chart(timings) for call, timings in timed.items()}
        for call in dict.fromkeys(call for row in update.rows for call in row.places):
            charts.setdefault(call, token_chart(update, call))
        return charts

    def packed(self) -> str:
        """All of it, for the page's script."""
        keys, rows = self.update.keys, self.update.rows
        order = np.argsort(self.update.tries().dfs_position_R).tolist() if rows else []
        return packed(
            {
                "name": self.name,
                "keys": keys,
                "columns": self.columns,
                "order": order,
                "shares_with": {row.row: row.shares_with for row in rows if row.shared_tokens},
                "charts": {name: vars(chart) for name, chart in self.charts.items()},
                "texts": [self.texts.get(key) for key in keys],
            }
        )

    def summary(self) -> dict[str, str]:
        """Its line in the table of steps."""
        keys, columns = self.update.keys, self.columns
        sessions = rows_of_sessions(keys)
        cells = {
            "prompts": f"{len(set(map(uid_of_key, keys))):,}",
            "sessions": f"{len(sessions):,}",
            "rows": f"{len(keys):,}",
        }
        for title, name in SUMS.items():
            if name in columns:
                cells[title] = f"{sum(columns[name]):,}"
        if "reward" in columns:
            # verl gives each row of a session the session's reward.
            rewards = [columns["reward"][session[-1]] for session in sessions]
            cells["reward"] = "unknown" if None in rewards else f"{sum(rewards) / len(rewards):.3f}"
        return cells


def write_page(
    out: Path,
    *,
    title: str,
    curves: Mapping[str, Curves],
    steps: Iterable[ShownStep],
    saved: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Writes the page.

    Args:
        curves: of each run, by its name.
        saved: sentences on what the runs have saved.
        notes: sentences on what was left out; they may grow while ``steps`` are taken.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    loader = PackageLoader("verl_padding.cli", "report_page")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    shown = [(step.run, step.name, step.summary(), step.packed()) for step in steps]
    text = templates.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=list(dict.fromkeys(run for run, *_ in shown)),
        columns=list(dict.fromkeys(name for _, _, cells, _ in shown for name in cells)),
        steps=shown,
        saved=saved,
        notes=notes,
        curves=packed(_by_metric(curves)),
        plotly=get_plotlyjs(),
    )
    out.write_text(text, encoding="utf-8")


def _by_metric(curves: Mapping[str, Curves]) -> dict[str, Any]:
    names = sorted({name for run_curves in curves.values() for name in run_curves})
    lines = {
        name: {
            run: [[step, or_null(value)] for step, value in run_curves.get(name, {}).items()]
            for run, run_curves in curves.items()
        }
        for name in names
    }
    return {"curves": lines, "first": [name for name in FIRST_CHARTS if name in lines]}


def packed(data: Any) -> str:
    """JSON, compressed, in letters that HTML takes as they are; the page unpacks it when it is
    looked at."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # No time in it (mtime), so that the same data make the same page.
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def cut_text(text: str, kept: int) -> Any:
    """A text, or its beginning, how many characters are left out, and its end."""
    if len(text) <= 2 * kept:
        return text
    return [text[:kept], len(text) - 2 * kept, text[-kept:]]
