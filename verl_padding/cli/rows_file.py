"""Reads batches of rows: of a file, of recorded steps, of verl's rollout dumps, or of an agent's trajectories."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from verl_padding.cli.file_rows import CountTokens, FileRow, extended_rows, forest_of, place_of
from verl_padding.cli.trajectories import (
    ChatEncoder,
    ModelCall,
    calls_of_log,
    calls_of_trajectories,
    is_log,
    is_trajectory,
)
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.counted import counted
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
    """Line of each row, from 0: blank lines and pads of stock verl are counted, though they are no rows. Calls of
    trajectories and of logs are counted instead, in the order of their files and lines."""
    pads: int  # of stock verl in a rollout dump, left out
    is_dump: bool  # whether the lengths are an estimate: a tokenizer's counts of a dump's text
    notes: tuple[str, ...] = ()  # what the rows are, or are not, of the file's trajectories


def read_batches(path: Path, count_tokens: CountTokens | None, encode: ChatEncoder | None = None) -> list[RowsFile]:
    """Reads a file, or ``-`` for standard input, or all steps of a folder, a batch each, in their order; or the ATIF
    trajectories of a folder and those below it, as one batch. Of a recorded step, each local update is a batch.

    Raises:
        PaddingDataError: the folder holds neither, a recorded step has no rows, or `read_rows` refuses a file.
    """
    if path == Path("-"):
        return list(_batches_of(sys.stdin.buffer, "standard input", count_tokens, encode))
    files = dumps_in(path) if path.is_dir() else [path]
    trajectories, skipped = _trajectories_of(path) if not files or path.suffix == ".json" else ({}, [])
    if trajectories:
        calls, notes = _calls_and_notes(trajectories)
        if skipped:
            notes.append(f"{counted(len(skipped), 'file')} of the folder, as {skipped[0].name}, left out: not JSON.")
        return [_batch([], calls, name=str(path), count_tokens=count_tokens, encode=encode, notes=notes)]
    if not files:
        raise PaddingDataError(
            f"{path}: holds no <step>.jsonl and no ATIF trajectory. Name the folder of trainer.rollout_data_dir, of "
            "padding.record_dir, or of trajectories."
        )
    batches: list[RowsFile] = []
    for file in files:
        with file.open("rb") as lines:
            batches += _batches_of(lines, str(file), count_tokens, encode)
    return batches


def _batches_of(
    lines: Iterator[bytes], name: str, count_tokens: CountTokens | None, encode: ChatEncoder | None
) -> Iterator[RowsFile]:
    """The local updates of a recorded step, or the batch of a file of rows. Lines are read once: a pipe has no more."""
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        yield read_rows(lines, name=name, count_tokens=count_tokens, encode=encode)
        return
    updates = steps_of(lines, name)
    for update in updates:
        yield _recorded_rows(update, name if len(updates) == 1 else f"{name}, update {update.update}")


def _trajectories_of(path: Path) -> tuple[dict[Path, Any], list[Path]]:
    """The ATIF trajectories among the JSON files of a folder and those below it, or in one file; and files of other
    texts, such as rows."""
    found, others = {}, []
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        try:
            document = json.loads(file.read_bytes())
        except ValueError:
            others.append(file)
            continue
        if is_trajectory(document):
            found[file] = document
    return found, others


def _calls_and_notes(documents: Mapping[Path, Any]) -> tuple[list[ModelCall], list[str]]:
    calls, missing = calls_of_trajectories(documents)
    if not missing:
        return calls, []
    named = f"{counted(len(missing), 'file')} to which trajectories refer, as {missing[0]}"
    return calls, [f"The plan leaves out {named}: not found."]


def _recorded_rows(update: RecordedStep, name: str) -> RowsFile:
    if not update.rows:
        raise PaddingDataError(f"{name}: holds laps alone. Record steps with padding.record=true.")
    tokens_R = [row.tokens for row in update.rows]
    # The update computes the first of them where it has no others.
    idle = sorted((row for row in update.rows if row.idle), key=lambda row: (not row.trained_tokens, row.tokens))
    rows = Rows.from_keys(update.keys, tokens_R, forest=update.forest(), idle=[row.row for row in idle])
    return RowsFile(name=name, rows=rows, lines_R=tuple(range(len(rows))), pads=0, is_dump=False)


def read_rows(
    lines: Iterable[bytes], *, name: str, count_tokens: CountTokens | None, encode: ChatEncoder | None = None
) -> RowsFile:
    """Reads one JSON object per line; docs/rows_file.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        count_tokens: counts the tokens of a text; needed for a rollout dump.
        encode: gives the tokens of a conversation; needed for logs and trajectories without token ids.

    Raises:
        PaddingDataError: a line is not a row, or the rows are not a batch.
    """
    found: list[FileRow] = []
    calls: list[ModelCall] = []
    trajectories: dict[Path, Any] = {}
    pads, is_dump = 0, False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if is_trajectory(entry):
                trajectories[Path(f"{name}, line {number + 1}")] = entry
            elif is_log(entry):
                calls += calls_of_log(entry, f"line {number}")
            elif "input" not in entry:
                found.append(_row_of_lengths(entry, number))
            elif entry["uid"].startswith(PAD_UID_PREFIX):
                pads += 1
            else:
                found.append(_dumped_row(entry, number, count_tokens))
                is_dump = True
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise PaddingDataError(f"{place_of(name, number)}: not a row ({why}). {FORMS}.") from error
    more, notes = _calls_and_notes(trajectories) if trajectories else ([], [])
    batch = _batch(found, [*calls, *more], name=name, count_tokens=count_tokens, encode=encode, notes=notes)
    return replace(batch, pads=pads, is_dump=is_dump)


def _batch(
    found: list[FileRow],
    calls: Sequence[ModelCall],
    *,
    name: str,
    count_tokens: CountTokens | None,
    encode: ChatEncoder | None,
    notes: Sequence[str],
) -> RowsFile:
    if not found and not calls:
        raise PaddingDataError(f"{name}: holds no row. {FORMS}.")
    if found and calls:
        raise PaddingDataError(f"{name}: holds rows and conversations. Give each a file of its own.")
    if calls:
        found, more = _rows_of_calls(calls, name, encode or ChatEncoder(None))
        notes = [*notes, *more]
    try:
        extends_R = extended_rows(found, name)
        rows = Rows.from_keys([row.key for row in found], [row.tokens for row in found], extends_R)
        # The update computes the first of them where it has no others: the shortest.
        idle = sorted(_of_equal_rewards(rows.key_R, [row.reward for row in found]), key=lambda r: (rows.tokens_R[r], r))
        rows = replace(rows, forest=forest_of(found, rows.tokens_R, count_tokens), idle=tuple(idle))
    except PlanError as error:
        raise PaddingDataError(f"{name}: {error}. {FORMS}.") from error
    lines_R = tuple(row.line for row in found)
    return RowsFile(name=name, rows=rows, lines_R=lines_R, pads=0, is_dump=False, notes=tuple(notes))


def _rows_of_calls(calls: Sequence[ModelCall], name: str, encode: ChatEncoder) -> tuple[list[FileRow], list[str]]:
    """A row for each call, and what a user should know of them."""
    found: list[FileRow] = []
    number_of: dict[str, dict[str, int]] = {}  # prompt -> session -> its number
    cut = 0
    for call in calls:
        try:
            encoded = encode(call)
            whole = _packed(encoded.token_ids)
        except (TemplateError, ValueError, TypeError) as error:
            raise PaddingDataError(f"{name}, call {len(found)}: {type(error).__name__}: {error}") from error
        cut += encoded.leaves_out
        sessions = number_of.setdefault(call.prompt, {})
        key = row_key(call.prompt, sessions.setdefault(call.session, len(sessions)), len(found))
        found.append(FileRow(len(found), key, len(encoded.token_ids), whole, None))
    notes = []
    if cut:
        answers = f"{cut} of {counted(len(found), 'answer')}"
        notes.append(
            f"The chat template leaves out text, reasoning or tool calls of {answers}: these rows are too short."
        )
    if any(call.has_images and call.token_ids is None for call in calls):
        notes.append("Images count as the few tokens that the chat template writes for one.")
    several = sum(call.model_calls > 1 for call in calls)
    if several:
        notes.append(
            f"{counted(several, 'step')} of several calls of the model: one row each, as their messages show it."
        )
    return found, notes


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
