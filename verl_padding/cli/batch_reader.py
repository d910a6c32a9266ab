"""Reads batches of rows: of a file, of recorded steps, or of verl's rollout dumps."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import row_key, uid_of_key
from verl_padding.record.step_file import RecordedStep, begins_step, parse_steps
from verl_padding.runs.run_files import dumps_in

FORMS = 'A row is {"prompt": "p0", "session": 0, "tokens": 512}; docs/reference.md has all forms'
Tokenize = Callable[[str], Sequence[int]]
"""The token ids of a text."""


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """The batch of a file."""

    name: str
    rows: Rows
    lines_R: tuple[int, ...]
    """Line of each row, from 0: blank lines and pads of stock verl are counted, though they are no
    rows."""
    pads: int = 0
    """Pads of stock verl in a rollout dump, which are left out."""
    is_dump: bool = False
    """Whether the lengths are an estimate: a tokenizer's counts of a dump's texts."""
    recorded: RecordedStep | None = None


class _Row(NamedTuple):
    """A row as a file has it."""

    line: int
    key: str
    tokens: Any  # `Rows` refuses what is not a whole number
    ids: Sequence[int] | None = None
    shares: Any = None  # tokens that it shares with the row on the line before


def read_batches(
    path: Path, tokenize: Tokenize | None, *, find_shared: bool = False
) -> tuple[list[FileBatch], list[PaddingDataError]]:
    """Reads a file, or ``-`` for standard input, or all steps of a folder, a batch each, in their
    order. Of a recorded step, each local update is a batch.

    Args:
        tokenize, find_shared: see :func:`read_rows`.

    Returns: the batches, one at least; and what is wrong with files of a folder that are left out:
        torn or empty, as a job leaves them that is writing or was killed, or of another kind.

    Raises:
        PaddingDataError: nothing is left, or the one file is refused.
    """
    options = {"tokenize": tokenize, "find_shared": find_shared}
    if path == Path("-"):
        return list(_read_lines(sys.stdin.buffer, "standard input", **options)), []
    files = dumps_in(path) if path.is_dir() else [path]
    if not files:
        why = "holds no <step>.jsonl"
        raise PaddingDataError(
            f"{path}: {why}. Name the folder of trainer.rollout_data_dir or of recorded steps."
        )
    batches: list[FileBatch] = []
    refused: list[PaddingDataError] = []
    for file in files:
        try:
            with file.open("rb") as lines:
                batches += list(_read_lines(lines, str(file), **options))
        except PaddingDataError as refusal:
            refused.append(refusal)
        except OSError as error:
            refused.append(
                PaddingDataError(f"{file}: cannot be read ({error.strerror}). Name a file of rows.")
            )
    if not batches:
        raise refused[0]
    return batches, refused


def _read_lines(lines: Iterator[bytes], name: str, **options: Any) -> Iterator[FileBatch]:
    # Lines are read once: a pipe has no more.
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        yield read_rows(lines, name=name, **options)
        return
    updates = parse_steps(lines, name)
    for update in updates:
        yield _recorded_batch(
            update, name if len(updates) == 1 else f"{name}, update {update.update}"
        )


def _recorded_batch(update: RecordedStep, name: str) -> FileBatch:
    if not update.rows:
        raise PaddingDataError(
            f"{name}: holds timings alone. Record steps with padding.record=true."
        )
    # The update computes the first of the idle rows where a mini-batch has no others.
    idle = sorted(
        (row for row in update.rows if row.idle),
        key=lambda row: (not row.trained_tokens, row.tokens),
    )
    rows = Rows.from_keys(
        update.keys,
        [row.tokens for row in update.rows],
        forest=update.forest(),
        idle=[row.row for row in idle],
    )
    return FileBatch(name=name, rows=rows, lines_R=tuple(range(len(rows))), recorded=update)


def read_rows(
    lines: Iterable[bytes], *, name: str, tokenize: Tokenize | None, find_shared: bool = False
) -> FileBatch:
    """Reads one JSON object per line; docs/reference.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        tokenize: needed for a rollout dump.
        find_shared: whether token ids of rows are compared.

    Raises:
        PaddingDataError: a line is not a row, or the rows are not a batch.
    """
    found: list[_Row] = []
    pads, is_dump = 0, False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "input" not in entry:
                found.append(_row_of_lengths(entry, number))
            elif entry["uid"].startswith(PAD_UID_PREFIX):
                pads += 1
            else:
                found.append(_dumped_row(entry, number, tokenize))
                is_dump = True
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            why = f"{type(error).__name__}: {error}"
            # JSON of a plan numbers rows from 0, editors number lines from 1.
            place = f"{name}, line {number + 1} (row number {number})"
            raise PaddingDataError(f"{place}: not a row ({why}). {FORMS}.") from error
    if not found:
        raise PaddingDataError(f"{name}: holds no row. {FORMS}.")
    keys = [row.key for row in found]
    try:
        rows = Rows.from_keys(
            keys, [row.tokens for row in found]
        )  # refuses tokens before they are used
        rows = Rows.from_keys(keys, rows.tokens_R, forest=_find_forest(found, find_shared))
    except PlanError as error:
        raise PaddingDataError(f"{name}: {error}. {FORMS}.") from error
    return FileBatch(
        name=name, rows=rows, lines_R=tuple(row.line for row in found), pads=pads, is_dump=is_dump
    )


def _row_of_lengths(entry: Mapping[str, Any], line: int) -> _Row:
    ids, lengths = None, []
    if "token_ids" in entry:
        ids = entry["token_ids"]
        numbers = np.array(ids)
        if numbers.ndim != 1 or (len(ids) and (numbers.dtype.kind != "i" or numbers.min() < 0)):
            raise ValueError("token ids are whole numbers from 0")
        lengths.append(len(ids))
    if "prompt_tokens" in entry:
        lengths.append(entry["prompt_tokens"] + entry["response_tokens"])
    if "tokens" in entry or not lengths:
        lengths.append(entry["tokens"])
    if len(set(lengths)) > 1:
        raise ValueError(f"its lengths differ: {lengths}")
    # The number of the line makes the key unique.
    key = row_key(entry["prompt"], entry["session"], line)
    return _Row(line, key, lengths[0], ids, entry.get("shares"))


def _dumped_row(entry: Mapping[str, Any], line: int, tokenize: Tokenize | None) -> _Row:
    if tokenize is None:
        raise ValueError(
            "a rollout dump has text without lengths: name the model's tokenizer with --tokenizer"
        )
    ids = [*tokenize(entry["input"]), *tokenize(entry["output"])]
    return _Row(line, entry["uid"], max(len(ids), 1), ids or [0])


def _find_forest(found: Sequence[_Row], find_shared: bool) -> Forest | None:
    """What rows of a prompt begin with alike, by ``shares``, or else by their token ids; None if
    that is not known."""
    if any(row.shares is not None for row in found):
        return _given_forest(found)
    if not find_shared or all(row.ids is None for row in found):
        return None
    # Rows without token ids are alone in their groups.
    ids_R = [
        np.array([0] * row.tokens if row.ids is None else row.ids, dtype=np.int64) for row in found
    ]
    group_R = [f"{uid_of_key(row.key)} " if row.ids is not None else row.key for row in found]
    return Forest.from_tokens(ids_R, group_R)


def _given_forest(found: Sequence[_Row]) -> Forest:
    """The lines are in the order of their trees, from the last to the first: a row comes after its
    beginnings."""
    for above, row in pairwise(found):
        same_prompt = uid_of_key(above.key) == uid_of_key(row.key)
        limit = min(above.tokens, row.tokens) if same_prompt else 0
        shares = 0 if row.shares is None else row.shares
        if type(shares) is not int or not 0 <= shares <= limit:
            raise PlanError(
                f"row number {row.line}: shares={shares!r} must be a whole number from 0 to {limit}"
            )
    shared_I = [0, *[row.shares or 0 for row in reversed(found)]]
    order = range(len(found))[::-1]
    return Forest.in_order([row.tokens for row in found], order, shared_I[:-1])
