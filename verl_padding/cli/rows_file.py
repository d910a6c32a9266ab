"""Reads batches of rows: of a file, of recorded steps, or of verl's rollout dumps."""

import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import numpy as np

from verl_padding.cli.file_rows import CountTokens, FileRow, extended_rows, forest_of, place_of
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import PlanError, Rows
from verl_padding.plan.row_keys import row_key
from verl_padding.record.step_file import RecordedStep, begins_step, steps_of
from verl_padding.runs.report import dumps_in

FORMS = 'A row is {"prompt": "p0", "session": 0, "tokens": 512}; docs/rows_file.md has all forms'

FIELDS = ("prompt", "session", "tokens", "prompt_tokens", "response_tokens", "token_ids", "extends", "shares")
DUMPED = ("uid", "input", "output", "extends")
"""Keys of a row by its length, and of a rollout dump, that are not null: a null is no value, but not an absent key."""


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """The batch of a file."""

    name: str
    rows: Rows
    lines_R: tuple[int, ...]
    """Line of each row, from 0: blank lines and pads of stock verl are counted, though they are no rows."""
    pads: int  # of stock verl in a rollout dump, left out
    is_dump: bool  # whether the lengths are an estimate: a tokenizer's counts of a dump's text


def read_batches(
    path: Path, count_tokens: CountTokens | None, *, with_idle: bool = False
) -> tuple[list[RowsFile], list[PaddingDataError]]:
    """Reads a file, or ``-`` for standard input, or all steps of a folder, a batch each, in their order. Of a recorded
    step, each local update is a batch.

    Args:
        count_tokens, with_idle: see :func:`read_rows`.

    Returns: the batches, one at least; and what is wrong with files of a folder that are left out: torn or empty, as a
        job leaves them that is writing or was killed, or of another kind.

    Raises:
        PaddingDataError: nothing is left, or the one file is refused.
    """
    options = {"count_tokens": count_tokens, "with_idle": with_idle}
    if path == Path("-"):
        return list(_batches_of(sys.stdin.buffer, "standard input", **options)), []
    files = dumps_in(path) if path.is_dir() else [path]
    if not files:
        raise PaddingDataError(
            f"{path}: holds no <step>.jsonl. Name the folder of trainer.rollout_data_dir or of padding.record_dir."
        )
    batches: list[RowsFile] = []
    refused: list[PaddingDataError] = []
    for file in files:
        try:
            with file.open("rb") as lines:
                batches += list(_batches_of(lines, str(file), **options))
        except PaddingDataError as refusal:
            refused.append(refusal)
        except OSError as error:
            refused.append(PaddingDataError(f"{file}: cannot be read ({error.strerror}). Name a file of rows."))
    if not batches:
        raise refused[0]
    return batches, refused


def _batches_of(lines: Iterator[bytes], name: str, **options: Any) -> Iterator[RowsFile]:
    """The local updates of a recorded step, or the batch of a file of rows. Lines are read once: a pipe has no more."""
    first = next(lines, b"")
    lines = chain([first], lines)
    if not begins_step(first):
        yield read_rows(lines, name=name, **options)
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


def read_rows(
    lines: Iterable[bytes], *, name: str, count_tokens: CountTokens | None, with_idle: bool = False
) -> RowsFile:
    """Reads one JSON object per line; docs/rows_file.md has its forms.

    Args:
        lines: UTF-8, which end at newlines alone: verl does not escape U+2028 and its like.
        count_tokens: counts the tokens of a text; needed for a rollout dump.
        with_idle: whether idle rows are looked for, by rewards.

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
                continue
            _refuse_nulls(entry, *DUMPED)
            if entry["uid"].startswith(PAD_UID_PREFIX):
                pads += 1
            else:
                found.append(_dumped_row(entry, number, count_tokens))
                is_dump = True
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise PaddingDataError(f"{place_of(name, number)}: not a row ({why}). {FORMS}.") from error
    if not found:
        raise PaddingDataError(f"{name}: holds no row. {FORMS}.")
    try:
        extends_R = extended_rows(found, name)
        rows = Rows.from_keys([row.key for row in found], [row.tokens for row in found], extends_R)
        idle: list[int] = []
        if with_idle and any(row.reward is not None for row in found):
            idle = _zero_advantage_rows(rows.key_R, [row.reward for row in found])
            idle.sort(key=lambda row: rows.tokens_R[row])  # an update of idle rows alone computes the first one
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


def _refuse_nulls(entry: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name in entry and entry[name] is None:
            raise ValueError(f"{name} is null: give it a value, or leave the key out")


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
    return None if value is None else float(value)


def _row_of_lengths(entry: dict[str, Any], line: int) -> FileRow:
    _refuse_nulls(entry, *FIELDS)
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


def _zero_advantage_rows(keys: Sequence[str], reward_R: Sequence[float | None]) -> list[int]:
    """Numbers of the rows that have an advantage of exactly 0 by verl's GRPO, in the function that a job calls.

    Three rewards of 0.9 have advantages of 0.056, by rounding, and sessions that earned 0, 0.5 and 1 have one of 0 in
    the middle. Where a session's reward is not known or not finite, none of its prompt is.

    Args:
        keys: of all rows; those of a session are in order.
        reward_R: of each row's session; a session's is that of its last row.
    """
    import torch
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    import verl_padding.on_cpu  # noqa: F401  (verl imports torchvision)

    # Not at the top: verl takes ten seconds, and warns of accelerators and engines that are not here.
    logging.disable(logging.WARNING)
    with catch_warnings(action="ignore"):
        from verl_padding.driver.advantages import MASK, SCORES
        from verl_padding.driver.idle_rows import row_advantages
    logging.disable(logging.NOTSET)

    reward_R1 = torch.tensor([[math.nan if reward is None else reward] for reward in reward_R])
    mask_R1 = torch.ones_like(reward_R1, dtype=torch.int64)
    columns = {MASK: mask_R1, SCORES: reward_R1}
    rows = TensorDict(
        {name: torch.nested.as_nested_tensor([*values], layout=torch.jagged) for name, values in columns.items()},
        batch_size=len(keys),
    )
    grpo = OmegaConf.create({"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0})
    sessions_per_prompt = 1  # which GRPO does not read
    advantage_R = row_advantages(rows, keys, grpo, sessions_per_prompt=sessions_per_prompt)
    return [row for row, advantage in enumerate(advantage_R) if not advantage.any()]
