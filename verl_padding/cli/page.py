"""The page that shows runs: one HTML file, which opens without a network."""

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_padding.cli.curves import ACTOR_STEPS, SESSION_REWARD, Curves
from verl_padding.job.metric_names import GRAD_NORM, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key
from verl_padding.record.step_file import Place, RecordedStep, or_null
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
    """The rows of a micro-batch on a rank, as long as their tokens; the record does not have its
    pads."""

    rank: int
    mini_batch: int
    micro_batch: int | None
    """None where verl's packer cuts the micro-batches, in the workers."""
    start: int
    tokens: int
    length: int
    """From its start until the rank with the most tokens is ready: the rest of it is waiting."""
    rows: Sequence[int]


def bars_of_call(update: RecordedStep, call: str) -> list[Bar]:
    """The bars of a worker call: a micro-batch begins when all ranks are ready with the one before.

    Two ranks that compute 3 and 2 tokens, and then 1 and 4, wait for 0 and 1, and then for 3 and 0:
    both are ready at 3, and then at 7.
    """
    held: dict[Place, list[int]] = {}
    for row in update.rows:
        if call in row.places:
            held.setdefault(row.places[call], []).append(row.row)
    tokens = {place: sum(update.rows[row].tokens for row in rows) for place, rows in held.items()}
    longest: dict[tuple[int, int], int] = {}
    for place in held:
        longest[_turn(place)] = max(longest.get(_turn(place), 0), tokens[place])
    turns = sorted(longest)
    starts = dict(
        zip(turns, accumulate((longest[turn] for turn in turns), initial=0), strict=False)
    )
    return [
        Bar(
            place.rank,
            place.mini_batch,
            place.micro_batch,
            starts[_turn(place)],
            tokens[place],
            longest[_turn(place)],
            rows,
        )
        for place, rows in held.items()
    ]


def _turn(place: Place) -> tuple[int, int]:
    # verl's packer cuts local mini-batches in the workers: each is one micro-batch here.
    return place.mini_batch, place.micro_batch or 0


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
        """Those of :data:`COLUMNS`."""
        return {name: [getattr(row, name) for row in self.update.rows] for name in COLUMNS}

    @property
    def charts(self) -> dict[str, list[Bar]]:
        """Bars of each worker call."""
        calls = dict.fromkeys(call for row in self.update.rows for call in row.places)
        return {call: bars_of_call(self.update, call) for call in calls}

    def packed(self) -> str:
        """All of it, for the page's script."""
        keys, rows = self.update.keys, self.update.rows
        return packed(
            {
                "name": self.name,
                "keys": keys,
                "columns": self.columns,
                "order": np.argsort(self.update.tries().dfs_position_R).tolist(),
                "shares_with": {row.row: row.shares_with for row in rows if row.shared_tokens},
                "charts": self.charts,
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
        cells |= {title: f"{sum(columns[name]):,}" for title, name in SUMS.items()}
        # verl gives each row of a session the session's reward.
        rewards = [columns["reward"][session[-1]] for session in sessions]
        reward = "unknown" if None in rewards else f"{sum(rewards) / len(rewards):.3f}"
        return cells | {"reward": reward}


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
