"""The file of a step, ``<step>.jsonl``, with the rows of each local update.

docs/reference.md has the form. Nothing of a row's texts or token ids is in it, but its key.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import StrictBool, TypeAdapter

from verl_padding.plan import Rows
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.record.files import Count, Number, as_data_error, read_lines, read_objects

FOLDER = "steps"
"""Where the files are if no folder is set: beside the folder of rollouts, or among the
checkpoints."""


class Place(NamedTuple):
    """Where a worker call computes a row."""

    mini_batch: Count
    rank: Count
    """Data-parallel rank."""
    micro_batch: Count | None
    """Its number in the mini-batch; None if verl's packer cuts the micro-batches."""


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """A row of a local update."""

    row: Count
    """Its number in the update, from 0."""
    key: str
    tokens: Count
    """Tokens of prompt and response."""
    trained_tokens: Count
    """Tokens that ``response_mask`` keeps."""
    reward: Number | None
    """The row's score, summed over its tokens; verl gives each row of a session the session's. None
    where it is not finite."""
    advantage: Number | None
    """Mean over its trained tokens; None where it has none."""
    zero_advantage: StrictBool
    """Whether it adds nothing to the gradient: no trained token, or an advantage of exactly 0 on
    each."""
    weight: Number | None
    """Factor of the gradient of its outputs in the actor's update; 1 if all rows weigh the same."""
    shared_tokens: Count
    """How many of its first tokens are also those of row ``shares_with``."""
    shares_with: Count | None
    """Number of the row with which it shares them: the one before it in the order of tries. None
    for none."""
    staleness: Count | None
    """Steps between the oldest weights that sampled it and the update: 0 if on-policy. None if
    unknown."""
    places: Mapping[str, Place]
    """Where each planned worker call computes it; calls that leave it out are missing."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A local update of a global step; modes without local updates have one per step."""

    form: Literal[4] = 4
    """Version of the form: a reader knows by it whether it can read a file."""
    step: Count
    update: Count
    """Its number in the step, from 0."""
    keys: tuple[str, ...] = field(repr=False)
    """Key of each row, in the order of the batch."""
    rows: list[RecordedRow] = field(default_factory=list, repr=False)
    """In the order of ``keys``."""

    def tries(self) -> PrefixTries:
        """The rows' common prefixes, within each prompt; a ValueError if they make no tries."""
        # Depth first, as a row is followed by the one that shares with it: of rows 0 to 2, where 2
        # shares with 0, the order is 0, 2, 1.
        follower = {row.shares_with: row.row for row in self.rows if row.shares_with is not None}
        order: list[int] = []
        for row in self.rows:
            at = None if row.shares_with is not None else row.row
            while at is not None:
                order.append(at)
                at = follower.get(at)
        if len(order) != len(self.rows):
            raise ValueError(f"shares_with makes tries of {len(order)} of {len(self.rows)} rows")
        tokens_R = np.array([row.tokens for row in self.rows], dtype=np.int64)
        return PrefixTries.in_order(
            tokens_R, order, [self.rows[row].shared_tokens for row in order]
        )


STEP, ROW = TypeAdapter(RecordedStep), TypeAdapter(RecordedRow)


def write_steps(updates: Iterable[RecordedStep], path: Path) -> None:
    """Writes the local updates of a step, and makes the folder: of each a line with its number and
    keys, then a line for each row. The file is there once it is whole."""
    lines: list[Mapping[str, Any]] = []
    for each in updates:
        header = {"form": each.form, "step": each.step, "update": each.update}
        lines.append(header | {"keys": each.keys})
        lines += [{name: or_null(value) for name, value in vars(row).items()} for row in each.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    written.write_text(
        "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    )
    os.replace(written, path)


def or_null(value: Any) -> Any:
    """What JSON, which has neither NaN nor infinity, takes for a value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def begins_step(line: bytes) -> bool:
    """Whether the first line of a file is that of a step; others hold rows in other forms."""
    return line.startswith(b'{"form":')


def read_steps(path: Path) -> list[RecordedStep]:
    """The local updates of a step's file, mostly one; a PaddingDataError if it holds something
    else."""
    return parse_steps(read_lines(path), str(path))


def parse_steps(lines: Iterable[bytes], name: str) -> list[RecordedStep]:
    """The same of a file's lines, and its name."""
    expected = f"the file of a step in form {RecordedStep.form}"
    fix = "Name one that padding.record=true has written in this version"
    steps: list[RecordedStep] = []
    with as_data_error(name, expected, fix):
        for line in read_objects(lines, name, expected, fix, _parse):
            if isinstance(line, RecordedStep):
                steps.append(line)
            else:
                steps[-1].rows.append(line)
        if not steps:
            raise LookupError("it holds no step")
        for step in steps:
            _check_rows(step)
    return steps


def _parse(values: dict[str, Any]) -> RecordedStep | RecordedRow:
    if "keys" in values:
        return STEP.validate_python({"form": None} | values)
    return ROW.validate_python(values)


def _check_rows(step: RecordedStep) -> None:
    """Whether the rows are those of the keys, and share what both have."""
    rows = step.rows
    if [(row.row, row.key) for row in rows] != [*enumerate(step.keys)]:
        raise LookupError(f"it holds {len(rows)} rows of {len(step.keys)} keys")
    Rows.from_keys(step.keys, [row.tokens for row in rows])
    step.tries()
    for row in rows:
        beside = row if row.shares_with is None else rows[row.shares_with]
        if row.shared_tokens > min(row.tokens, beside.tokens):
            raise ValueError(f"row {row.row}: shared_tokens={row.shared_tokens}")
