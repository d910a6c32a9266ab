"""Reads batches of rows: of a file of rows, of a recorded step, or of verl's rollout dump."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import row_key
from verl_padding.record.files import as_data_error, read_lines
from verl_padding.record.step_file import RecordedStep, begins_step, parse_steps

FORMS = 'A row is {"prompt": "p0", "session": 0, "tokens": 512}; docs/reference.md has all forms'
Tokenize = Callable[[str], Sequence[int]]
"""The token ids of a text."""
Row = tuple[str, Any, np.ndarray]
"""Key, tokens (``Rows`` refuses what is not a whole number), and token ids; of a row by its length
one id, below 0, that no other row has."""


def read_batches(path: Path, tokenize: Tokenize | None) -> Iterator[tuple[str, Rows]]:
    """Reads a file: a batch with its name, or one for each local update of a recorded step.

    Args:
        tokenize: see :func:`read_rows`.
    """
    lines, name = read_lines(path, may_be_pipe=True), str(path)
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        yield name, read_rows(lines, name=name, tokenize=tokenize)
        return
    updates = parse_steps(lines, name)
    for update in updates:
        own = f"{name}, update {update.update}" if len(updates) > 1 else name
        yield own, _recorded_rows(update)


def _recorded_rows(update: RecordedStep) -> Rows:
    # The update computes the first of the zero-advantage rows where a mini-batch has no others: a
    # short one with trained tokens.
    dropped = sorted(
        (row for row in update.rows if row.zero_advantage),
        key=lambda row: (not row.trained_tokens, row.tokens),
    )
    return Rows.from_keys(
        update.keys,
        [row.tokens for row in update.rows],
        tries=update.tries(),
        zero_advantage=[row.row for row in dropped],
    )


def read_rows(lines: Iterable[bytes], *, name: str, tokenize: Tokenize | None) -> Rows:
    """Reads one JSON object per line; docs/reference.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        tokenize: needed for a rollout dump.

    Raises:
        PaddingDataError: a line is not a row, or the rows are not a batch.
    """
    found: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with as_data_error(f"{name}, line {number}", "a row", FORMS):
            entry = dict(json.loads(line))
            if "input" not in entry:
                found.append(_row_of_lengths(entry, number))
            elif not entry["uid"].startswith(PAD_UID_PREFIX):
                found.append(_dumped_row(entry, tokenize))
    with as_data_error(name, "a batch", FORMS):
        if not found:
            raise PlanError("it holds no row")
        keys, tokens_R, ids_R = zip(*found, strict=True)
        rows = Rows.from_keys(keys, tokens_R)
        if all(ids[0] < 0 for ids in ids_R):
            return rows
        # What those of a prompt begin with alike.
        tries = PrefixTries.from_tokens(ids_R, rows.prompt_R)
        return replace(rows, tries=replace(tries, tokens_R=np.array(rows.tokens_R)))


def _row_of_lengths(entry: Mapping[str, Any], line: int) -> Row:
    if type(prompt := entry["prompt"]) not in (str, int):
        raise TypeError(f"prompt={prompt!r}: must be a string or an integer")
    # The number of the line makes the key unique.
    key = row_key(prompt, entry["session"], line)
    if "token_ids" not in entry:
        return key, entry["tokens"], np.array([-line])
    ids = np.array(entry["token_ids"])
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind != "i" or ids.min() < 0)):
        raise ValueError("token ids are whole numbers from 0")
    return key, len(ids), ids


def _dumped_row(entry: Mapping[str, Any], tokenize: Tokenize | None) -> Row:
    if tokenize is None:
        raise ValueError("a rollout dump has texts: name the model's tokenizer with --tokenizer")
    ids = np.array([*tokenize(entry["input"]), *tokenize(entry["output"])] or [0])
    return entry["uid"], len(ids), ids
