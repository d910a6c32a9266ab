"""What a report has of a recorded step: numbers of its rows, column by column, its laps, and texts from the dump."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.cli.first_difference import first_difference
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import index_of_key, session_of_key
from verl_padding.record.step_file import RecordedStep, or_null
from verl_padding.runs.report import read_dump
from verl_padding.timing.timings import MicroBatchTiming

MOST_RANKS = 64  # whose bars are drawn
TEXT, BESIDE = 400, 160
"""Characters that are kept at either end of a text, and at either side of the place where two rows part."""

Shown = str | tuple[str, int, str]
"""A text, or its beginning, how many characters are left out, and its end."""


@dataclass(frozen=True, kw_only=True)
class DumpedText:
    """A row of a rollout dump."""

    input: str
    output: str

    @property
    def whole(self) -> str:
        return self.input + self.output


def read_texts(dump: Path) -> dict[str, DumpedText]:
    """The texts of a rollout dump by the keys of their rows, without stock verl's pads, none where there is no dump; a
    PaddingDataError if it is torn, or none of verl's."""
    if not dump.exists():
        return {}
    rows = read_dump(dump, uid=str, input=str, output=str)
    real = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]
    return {row["uid"]: DumpedText(input=row["input"], output=row["output"]) for row in real}


def step_as_json(update: RecordedStep, texts: Mapping[str, DumpedText], *, whole_texts: bool) -> dict[str, Any]:
    """All that the page shows of a local update.

    Args:
        texts: of its rows, as far as they are known.
        whole_texts: False to leave out what is far from their ends and from where rows part. Whole ones are there once,
            and the page finds in them what is on both sides of where rows part.
    """
    rows, forest = update.rows, update.forest()
    kept, beside = (None, None) if whole_texts else (TEXT, BESIDE)
    ranks = {lap.rank for lap in update.timings} | {place.rank for row in rows for place in row.places.values()}
    shown = [texts.get(row.key) for row in rows]
    calls = dict.fromkeys(call for row in rows for call in row.places)
    return {
        "step": update.step,
        "update": update.update,
        "keys": list(update.keys),
        "rows": {name: [or_null(getattr(row, name)) for row in rows] for name in _COLUMNS},
        "places": {call: [row.places.get(call) for row in rows] for call in calls},
        "order": forest.place_R.tolist(),
        "laps": [_lap(lap) for lap in update.timings if lap.rank < MOST_RANKS],
        "ranks": 1 + max(ranks, default=-1),
        "texts": [text and [_cut(text.input, kept), _cut(text.output, kept)] for text in shown],
        "partings": _partings(update, forest, texts, beside) if rows else [],
    }


_COLUMNS = ("tokens", "trained_tokens", "reward", "advantage", "idle", "weight", "shared_tokens", "shares_with", "age")


def _lap(lap: MicroBatchTiming) -> list[Any]:
    busy = lap.known_busy_s
    return [
        lap.call,
        lap.rank,
        lap.mini_batch,
        lap.micro_batch,
        lap.start_s,
        lap.seconds,
        busy,
        lap.rows,
        lap.pads,
        lap.tokens,
    ]


def _partings(
    update: RecordedStep, forest: Forest, texts: Mapping[str, DumpedText], beside: int | None
) -> list[list[dict[str, Any]]]:
    """Of each row, where its text parts from that of the row that it shares with, and of the one before it in its
    session; and so many characters beside that place, none if ``beside`` is None."""
    number_of = {key: row for row, key in enumerate(update.keys)}
    partings: list[list[dict[str, Any]]] = [[] for _ in update.keys]
    for row in update.rows:
        before = number_of.get(f"{session_of_key(row.key)}_{index_of_key(row.key) - 1}")
        for other in dict.fromkeys((row.shares_with, before)):
            if other is None or row.key not in texts or update.keys[other] not in texts:
                continue
            mine, its = texts[row.key].whole, texts[update.keys[other]].whole
            at = first_difference(mine, its)
            (shared,) = forest.shared_by_pairs(np.array([row.row]), np.array([other])).tolist()
            parting: dict[str, Any] = {"with": other, "shared_tokens": shared, "characters": at}
            if beside is not None:
                parting["before"] = _end(mine[:at], beside)
                parting |= {"mine": _beginning(mine[at:], beside), "its": _beginning(its[at:], beside)}
            partings[row.row].append(parting)
    return partings


def _cut(text: str, kept: int | None) -> Shown:
    if kept is None or len(text) <= 2 * kept:
        return text
    return text[:kept], len(text) - 2 * kept, text[-kept:]


def _beginning(text: str, kept: int) -> Shown:
    return text if len(text) <= kept else (text[:kept], len(text) - kept, "")


def _end(text: str, kept: int) -> Shown:
    return text if len(text) <= kept else ("", len(text) - kept, text[-kept:])
