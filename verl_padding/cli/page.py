"""The page that shows runs and plans: one HTML file, which opens without a network."""

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, Curves
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key
from verl_padding.record.step_file import Place, RecordedStep, or_null
from verl_padding.record.timings import MicroBatchTiming, timings_by_call
from verl_padding.version import __version__

FIRST_CHARTS = (
    SESSION_REWARD,
    "padding/real_rows/total",
    "padding/pad_rows/total",
    ACTOR_STEPS,
    "actor/grad_norm",
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


def planned_chart(layout: Layout, costs: CallCosts) -> Chart:
    """A layout, by what its rows and pads cost."""
    # Costs are large integers without a unit; a row of 1000 tokens makes them readable.
    unit = costs.row_cost(1000)
    bars = []
    for mini_batch, rows_DK in enumerate(layout.rows_MDK):
        _, load_DK = costs.micro_batch_loads(rows_DK)
        for rank, (rows_K, load_K) in enumerate(zip(rows_DK, load_DK.tolist(), strict=True)):
            for micro_batch, (rows, load) in enumerate(zip(rows_K, load_K, strict=True)):
                real = [row for row in rows if row < costs.n_rows]
                pads = len(rows) - len(real)
                tokens = int(costs.tokens_R[real].sum()) + pads * costs.pad_tokens
                number = None if layout.cut_by == "verl" else micro_batch
                bars.append(Bar(rank, mini_batch, number, 0, load / unit, 0, real, pads, tokens))
    return Chart(unit="cost, in rows of 1000 tokens", bars=one_after_the_other(bars))


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
    """The rows of a batch, and the charts of what computed them."""

    name: str
    run: str = ""
    keys: Sequence[str]
    columns: Mapping[str, Sequence[Any]] = field(repr=False)
    """Those of :data:`COLUMNS` that are known; none where rows are not recorded."""
    charts: Mapping[str, Chart] = field(repr=False)
    tries: PrefixTries | None = field(default=None, repr=False)
    texts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of a row's key: its input, its output, and where it branches off the row that it shares
    with."""

    def packed(self) -> str:
        """All of it, for the page's script."""
        order = (
            range(len(self.keys))
            if self.tries is None
            else np.argsort(self.tries.dfs_position_R).tolist()
        )
        # In that order, a row shares its first tokens with the one before it.
        shared = self.columns.get("shared_tokens", [0] * len(self.keys))
        shares_with = {row: before for before, row in pairwise(order) if shared[row]}
        return packed(
            {
                "name": self.name,
                "keys": self.keys,
                "columns": self.columns,
                "order": list(order),
                "shares_with": shares_with,
                "charts": {name: vars(chart) for name, chart in self.charts.items()},
                "texts": [self.texts.get(key) for key in self.keys],
            }
        )

    def summary(self) -> dict[str, str]:
        """Its line in the table of steps."""
        sessions, columns = rows_of_sessions(self.keys), self.columns
        cells = {
            "prompts": f"{len(set(map(uid_of_key, self.keys))):,}",
            "sessions": f"{len(sessions):,}",
            "rows": f"{len(self.keys):,}",
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
    saved: Sequence[str] = (),
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


def recorded_step(update: RecordedStep, *, run: str, texts: Mapping[str, Any]) -> ShownStep:
    """A recorded local update: its charts are by the clock where it was timed."""
    charts = {
        call: timed_chart(timings) for call, timings in timings_by_call(update.timings).items()
    }
    for call in dict.fromkeys(call for row in update.rows for call in row.places):
        charts.setdefault(call, token_chart(update, call))
    name = f"Step {update.step}" + (f", update {update.update}" if update.update else "")
    return ShownStep(
        name=name,
        run=run,
        keys=update.keys,
        columns={
            name: [getattr(row, name) for row in update.rows] for name in COLUMNS if update.rows
        },
        charts=charts,
        tries=update.tries() if update.rows else None,
        texts=texts,
    )


def cut_text(text: str, kept: int) -> Any:
    """A text, or its beginning, how many characters are left out, and its end."""
    if len(text) <= 2 * kept:
        return text
    return [text[:kept], len(text) - 2 * kept, text[-kept:]]
