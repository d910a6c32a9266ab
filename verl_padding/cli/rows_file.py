"""Reads batches of rows: of a file, of recorded steps, or of verl's rollout dumps."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.cli.file_rows import CountTokens, FileRow, extended_rows, forest_of, place_of
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.row_keys import row_key, rows_of_sessions, uid_of_key
from verl_padding.record.step_file import RecordedStep, begins_step, steps_of
from verl_padding.runs.report import dumps_in

FORMS = 'A row is {"prompt": "p0", "session": 0, "tokens": 512}; docs/rows_file.md has all forms'


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """The batch of a file."""

    name: str
    rows: Rows
    lines_R: tuple[int, ...]
    """Line of each row, from 0: blank lines and pads of stock verl are counted, though they are no rows."""
    pads: int  # of stock verl in a rollout dump, left out
    is_dump: bool  # whether the lengths are an estimate: a tokenizer's counts of a dump's text


def read_batches(path: Path, count_tokens: CountTokens | None) -> list[RowsFile]:
    """Reads a file, or ``-`` for standard input, or all steps of a folder, a batch each, in their order. Of a recorded
    step, each local update is a batch.

    Raises:
        PaddingDataError: the folder holds no step, a recorded step has no rows, or `read_rows` refuses a file.
    """
    if path == Path("-"):
        return list(_batches_of(sys.stdin.buffer, "standard input", count_tokens))
    files = dumps_in(path) if path.is_dir() else [path]
    if not files:
        raise PaddingDataError(
            f"{path}: holds no <step>.jsonl. Name the folder of trainer.rollout_data_dir or of padding.record_dir."
        )
    batches: list[RowsFile] = []
    for file in files:
        with file.open("rb") as lines:
            batches += _batches_of(lines, str(file), count_tokens)
    return batches


def _batches_of(lines: Iterator[bytes], name: str, count_tokens: CountTokens | None) -> Iterator[RowsFile]:
    """The local updates of a recorded step, or the batch of a file of rows. Lines are read once: a pipe has no more."""
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        yield read_rows(lines, name=name, count_tokens=count_tokens)
        return
    updates = steps_of(lines, name)
    for update in updates:
        yield _recorded_rows(update, name if len(updates) == 1 else f"{name}, update {update.update}")


def _recorded_rows(update: RecordedStep, name: str) -> RowsFile:
    if not update.rows:
        raise PaddingDataError(f"{name}: holds laps alone. Record steps with padding.record=true.")
    tokens_R = [row.tokens for row in update.rows]
    # The update computes the first of them where it has no others.
    idle = sorted((row for row in update.rows if row.idle), key=lambda row: (not row.trained_tokens, row.tokens))
    rows = Rows.from_keys(update.keys, tokens_R, forest=update.forest(), idle=[row.row for row in idle])
    return RowsFile(name=name, rows=rows, lines_R=tuple(range(len(rows))), pads=0, is_dump=False)


def read_rows(lines: Iterable[bytes], *, name: str, count_tokens: CountTokens | None) -> RowsFile:
    """Reads one JSON object per line; docs/rows_file.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        count_tokens: counts the tokens of a text; needed for a rollout dump.

    Raises:
        PaddingDataError: a line is not a row, or the rows are not a batch.
    """
    found: list[FileRow] = []
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
                found.append(_dumped_row(entry, number, count_tokens))
                is_dump = True
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise PaddingDataError(f"{place_of(name, number)}: not a row ({why}). {FORMS}.") from error
    if not found:
        raise PaddingDataError(f"{name}: holds no row. {FORMS}.")
    try:
        extends_R = extended_rows(found, name)
        rows = Rows.from_keys([row.key for row in found], [row.tokens for row in found], extends_R)
        # The update computes the first of them where it has no others: the shortest.
        idle = sorted(_of_equal_rewards(rows.key_R, [row.reward for row in found]), key=lambda r: (rows.tokens_R[r], r))
        rows = replace(rows, forest=forest_of(found, rows.tokens_R, count_tokens), idle=tuple(idle))
    except PlanError as error:
        raise PaddingDataError(f"{name}: {error}. {FORMS}.") from error
    lines_R = tuple(row.line for row in found)
    return RowsFile(name=name, rows=rows, lines_R=lines_R, pads=pads, is_dump=is_dump)


def _packed(ids: Sequence[int]) -> bytes:
    """Token ids, four bytes each, big endian: they sort as the ids do, and begin alike if these do."""
    found = np.array(ids)
    whole = found.ndim == 1 and found.dtype.kind in "iu" and bool not in map(type, ids)
    if len(ids) and not (whole and 0 <= found.min() <= found.max() < 1 << 32):
        raise ValueError(f"token ids are whole numbers from 0 to {(1 << 32) - 1}")
    return found.astype(">u4").tobytes()


def _dumped_row(entry: dict[str, Any], line: int, count_tokens: CountTokens | None) -> FileRow:
    if count_tokens is None:
        raise ValueError("a rollout dump has text without lengths: name the model's tokenizer with --tokenizer")
    tokens = count_tokens(entry["input"]) + count_tokens(entry["output"])
    whole, extends = entry["input"] + entry["output"], entry.get("extends")
    return FileRow(line, entry["uid"], max(tokens, 1), whole, extends, reward=_reward(entry, "score"))


def _reward(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    if not isinstance(value, int | float | None):
        raise TypeError(f"{name}={value!r} is not a number")
    return value


def _row_of_lengths(entry: dict[str, Any], line: int) -> FileRow:
    whole = _packed(entry["token_ids"]) if "token_ids" in entry else None
    lengths = [] if whole is None else [len(entry["token_ids"])]
    if "prompt_tokens" in entry:
        lengths.append(entry["prompt_tokens"] + entry["response_tokens"])
    if "tokens" in entry or not lengths:
        lengths.append(entry["tokens"])
    if len(set(lengths)) > 1:
        raise ValueError(f"its lengths differ: {lengths}")
    # The number of the line makes the key unique.
    key = row_key(entry["prompt"], entry["session"], line)
    return FileRow(line, key, lengths[0], whole, entry.get("extends"), entry.get("shares"), _reward(entry, "reward"))


def _of_equal_rewards(keys: Sequence[str], reward_R: Sequence[float | None]) -> list[int]:
    """Rows of the prompts of which two sessions or more have earned something, and all the same, by their last rows."""
    rows_of: dict[str, list[int]] = {}
    rewards_of: dict[str, list[float | None]] = {}
    for session in rows_of_sessions(keys):
        uid = uid_of_key(keys[session[0]])
        rows_of.setdefault(uid, []).extend(session)
        rewards_of.setdefault(uid, []).append(reward_R[session[-1]])
    # NaN equals nothing.
    equal = (uid for uid, of in rewards_of.items() if len(of) > 1 and None not in of and all(r == of[0] for r in of))
    return [row for uid in equal for row in rows_of[uid]]
