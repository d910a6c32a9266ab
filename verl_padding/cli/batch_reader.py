"""Reads batches of rows: of a file, of recorded steps, or of verl's rollout dumps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import row_key, uid_of_key
from verl_padding.record.data_errors import as_data_error
from verl_padding.record.files import load_json, read_lines
from verl_padding.record.run_files import dumps_in
from verl_padding.record.step_file import RecordedStep, begins_step, parse_steps

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
    is_dump: bool = False
    """Whether the lengths are an estimate: a tokenizer's counts of a dump's texts."""
    recorded: RecordedStep | None = None


class _Row(NamedTuple):
    """A row as a file has it."""

    key: str
    tokens: Any  # `Rows` refuses what is not a whole number
    ids: np.ndarray | None


def read_batches(
    path: Path, tokenize: Tokenize | None
) -> tuple[list[FileBatch], list[PaddingDataError]]:
    """Reads a file, or all steps of a folder, a batch each, in their order. Of a recorded step,
    each local update is a batch.

    Args:
        tokenize: see :func:`read_rows`.

    Returns: the batches, one at least; and what is wrong with files of a folder that are left out:
        torn or empty, as a job leaves them that is writing or was killed, or of another kind.

    Raises:
        PaddingDataError: nothing is left, or the one file is refused.
    """
    files = dumps_in(path) if path.is_dir() else [path]
    if not files:
        fix = "Name the folder of trainer.rollout_data_dir or of recorded steps"
        raise PaddingDataError(f"{path}: holds no <step>.jsonl. {fix}.")
    batches: list[FileBatch] = []
    refused: list[PaddingDataError] = []
    for file in files:
        try:
            batches += _read_file(file, tokenize, may_be_pipe=file == path)
        except PaddingDataError as refusal:
            refused.append(refusal)
    # A folder of which nothing can be read is refused by its first file's reason.
    if not batches:
        raise refused[0]
    return batches, refused


def _read_file(file: Path, tokenize: Tokenize | None, *, may_be_pipe: bool) -> list[FileBatch]:
    name = str(file)
    lines = read_lines(file, may_be_pipe=may_be_pipe)
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        return [read_rows(lines, name=name, tokenize=tokenize)]
    updates = parse_steps(lines, name)
    if len(updates) == 1:
        return [_recorded_batch(updates[0], name)]
    return [_recorded_batch(update, f"{name}, update {update.update}") for update in updates]


def _recorded_batch(update: RecordedStep, name: str) -> FileBatch:
    if not update.rows:
        raise PaddingDataError(
            f"{name}: holds only timings. Record steps with padding.record=true."
        )
    # The update computes the first of the zero-advantage rows where a mini-batch has no others: a
    # short one with trained tokens.
    dropped = sorted(
        (row for row in update.rows if row.zero_advantage),
        key=lambda row: (not row.trained_tokens, row.tokens),
    )
    rows = Rows.from_keys(
        update.keys,
        [row.tokens for row in update.rows],
        tries=update.tries(),
        zero_advantage=[row.row for row in dropped],
    )
    return FileBatch(name=name, rows=rows, lines_R=tuple(range(len(rows))), recorded=update)


def read_rows(lines: Iterable[bytes], *, name: str, tokenize: Tokenize | None) -> FileBatch:
    """Reads one JSON object per line; docs/reference.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        tokenize: needed for a rollout dump.

    Raises:
        PaddingDataError: a line is not a row, or the rows are not a batch.
    """
    found: dict[int, _Row] = {}
    is_dump = False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        # JSON of a plan numbers rows from 0, editors number lines from 1.
        place = f"{name}, line {number + 1} (row number {number})"
        with as_data_error(place, "a row", FORMS):
            entry = dict(load_json(line))
            is_dump = is_dump or "input" in entry
            if "input" not in entry:
                found[number] = _row_of_lengths(entry, number)
            elif not entry["uid"].startswith(PAD_UID_PREFIX):
                found[number] = _dumped_row(entry, tokenize)
    if not found:
        raise PaddingDataError(f"{name}: holds no row. {FORMS}.")
    try:
        keys = [row.key for row in found.values()]
        # Refuses tokens that are no numbers, before they are used.
        rows = Rows.from_keys(keys, [row.tokens for row in found.values()])
        if any(row.ids is not None for row in found.values()):
            rows = Rows.from_keys(keys, rows.tokens_R, tries=_find_tries([*found.values()]))
    except PlanError as error:
        raise PaddingDataError(f"{name}: {error}. {FORMS}.") from error
    return FileBatch(name=name, rows=rows, lines_R=tuple(found), is_dump=is_dump)


def _row_of_lengths(entry: Mapping[str, Any], line: int) -> _Row:
    if type(prompt := entry["prompt"]) not in (str, int):
        raise TypeError(f"prompt={prompt!r}: a text or a whole number names it")
    # The number of the line makes the key unique.
    key, ids, lengths = row_key(prompt, entry["session"], line), None, []
    if "token_ids" in entry:
        ids = np.array(entry["token_ids"])
        if ids.ndim != 1 or (len(ids) and (ids.dtype.kind != "i" or ids.min() < 0)):
            raise ValueError("token ids are whole numbers from 0")
        lengths.append(len(ids))
    if "prompt_tokens" in entry:
        lengths.append(entry["prompt_tokens"] + entry["response_tokens"])
    if "tokens" in entry or not lengths:
        lengths.append(entry["tokens"])
    if any(length != lengths[0] for length in lengths):
        raise ValueError(f"its lengths differ: {lengths}")
    return _Row(key, lengths[0], ids)


def _dumped_row(entry: Mapping[str, Any], tokenize: Tokenize | None) -> _Row:
    if tokenize is None:
        raise ValueError("a rollout dump has texts: name the model's tokenizer with --tokenizer")
    ids = np.array([*tokenize(entry["input"]), *tokenize(entry["output"])] or [0])
    return _Row(entry["uid"], len(ids), ids)


def _find_tries(found: Sequence[_Row]) -> PrefixTries:
    """What rows of a prompt begin with alike, by their token ids; others share nothing, and come
    last."""
    with_ids = [row for row, each in enumerate(found) if each.ids is not None]
    tries = PrefixTries.from_tokens(
        [each.ids for each in found if each.ids is not None],
        [uid_of_key(found[row].key) for row in with_ids],
    )
    order = np.argsort(tries.dfs_position_R)
    others = [row for row, each in enumerate(found) if each.ids is None]
    return PrefixTries.in_order(
        [each.tokens for each in found],
        [with_ids[place] for place in order] + others,
        [*tries.shared_R[order], *[0] * len(others)],
    )
