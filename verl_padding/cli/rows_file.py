"""Reads a batch's rows from a file of their lengths, or from a rollout dump of verl."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_padding.cli.row_lines import RowLine, extended_rows, in_line, place
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import MOST_TOKENS, Rows
from verl_padding.plan.row_keys import KEY_FORM, parts_of_key, row_key, session_name
from verl_padding.runs.report import dumps_in

CountTokens = Callable[[str], int]

STANDARD_INPUT = Path("-")
FORMS = (
    'a row is {"prompt": "p0", "session": 0, "tokens": 512}, with prompt_tokens and response_tokens, or token_ids, in '
    "place of tokens if you like; a line of verl's rollout dump has uid, input and output"
)
MOST = MOST_TOKENS
"""A larger number of tokens, or number of a session, is a mistake."""
PARQUET = b"PAR1"
"""A parquet file begins with this."""
SHOWN = 40
"""Letters of a wrong value that a message shows."""


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """What a file says of a batch."""

    name: str
    rows: Rows
    lines_R: tuple[int, ...]
    """Line of each row in the file, from 0: blank lines and pads of stock verl are counted, though they are no rows."""
    pads: int
    """Pads of stock verl in a rollout dump, left out."""
    counted: bool
    """Whether the lengths are an estimate: a tokenizer's counts of a dump's text."""
    half_written: int | None = None
    """Line of a dump, its last, that is half written and left out."""

    def place(self, row: int) -> str:
        """Where a row stands, for a message."""
        return place(self.name, self.lines_R[row])


class NoRowError(PaddingDataError):
    """A file that holds no row."""


def files_of(path: Path) -> list[Path]:
    """The files to read, a batch each: one, or all ``<step>.jsonl`` of a folder, in the order of the steps.

    Args:
        path: a file; a folder of rollout dumps; or ``-``, standard input.

    Raises:
        PaddingDataError: the folder cannot be read, or holds no dump.
    """
    if path == STANDARD_INPUT or not os.path.isdir(path):
        return [path]
    dumps = dumps_in(path)
    if not dumps:
        raise PaddingDataError(
            f"{path}: holds no <step>.jsonl, such as 1.jsonl. Name a file of rows, or the folder of "
            "trainer.rollout_data_dir, where verl writes one for each step."
        )
    return dumps


def read_rows_file(file: Path, count_tokens: CountTokens | None) -> RowsFile:
    """Reads one file, or standard input, as `read_rows` does.

    Raises:
        PaddingDataError: it cannot be read, or `read_rows` refuses it.
    """
    if file == STANDARD_INPUT:
        return read_rows(sys.stdin.buffer, name="standard input", count_tokens=count_tokens)
    try:
        with file.open("rb") as lines:
            return read_rows(lines, name=str(file), count_tokens=count_tokens, is_dump=file.stem.isdecimal())
    except OSError as error:
        raise PaddingDataError(
            f"{file}: cannot be read ({error.strerror}). Name a file of rows, one JSON object per line; a folder of "
            "rollout dumps; or - for standard input."
        ) from error


def read_rows(
    lines: Iterable[bytes], *, name: str, count_tokens: CountTokens | None, is_dump: bool = False
) -> RowsFile:
    """Reads one JSON object per line; docs/rows_file.md has its forms.

    Args:
        lines: UTF-8, with or without a byte order mark; they end at newlines alone, for verl does not escape U+2028 and
            its like, at which other readers break lines.
        name: of the file, for messages.
        count_tokens: counts the tokens of a text; needed for a rollout dump.
        is_dump: a last line without a newline that is not JSON is left out: a job that was killed leaves it so.

    Raises:
        NoRowError: there is no row at all.
        PaddingDataError: a line is none of a row; its number is given.
    """
    found: list[RowLine] = []
    pads: set[int] = set()
    line_of_key: dict[str, int] = {}
    rows_of: dict[tuple[str, int], int] = {}
    number = -1
    counted = False
    half_written = None
    for number, entry in _objects(lines, name, is_dump):
        if entry is None:
            half_written = number
            continue
        where = place(name, number)
        if "uid" in entry and ("prompt" not in entry or "input" in entry):
            row = _dumped_row(entry, number, where, count_tokens)
            counted = True
        else:
            row = _row_of_lengths(entry, number, where, rows_of)
        if row is None:
            pads.add(number)
            continue
        if row.key in line_of_key:
            raise PaddingDataError(
                f"{where}: the row {row.key!r} is in {in_line(line_of_key[row.key])} too. A batch has each row once: "
                "put each batch into a file of its own."
            )
        line_of_key[row.key] = number
        found.append(row)
    if not found:
        raise NoRowError(f"{name}: holds no row. One JSON object per line is needed: {FORMS}.")
    rows = Rows(
        key_R=tuple(row.key for row in found),
        prompt_R=tuple(row.prompt for row in found),
        session_R=tuple(row.session for row in found),
        tokens_R=tuple(row.tokens for row in found),
        extends_R=extended_rows(found, name=name, pads=pads, n_lines=number + 1),
    )
    return RowsFile(
        name=name,
        rows=rows,
        lines_R=tuple(row.line for row in found),
        pads=len(pads),
        counted=counted,
        half_written=half_written,
    )


def _objects(lines: Iterable[bytes], name: str, is_dump: bool) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The objects of the lines that are not blank, each with the number of its line, from 0.

    Args:
        is_dump: None stands for a last line that is half written.
    """
    for number, line in enumerate(lines):
        try:
            value = _json(line, place(name, number), encoding="utf-8" if number else "utf-8-sig")
        except PaddingDataError:
            if not is_dump or line.endswith(b"\n"):
                raise
            yield number, None
            return
        if value is not None:
            yield number, value


def _json(line: bytes, where: str, *, encoding: str) -> dict[str, Any] | None:
    """The object of a line; None if it is blank."""
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError as error:
        if line.startswith(PARQUET):
            raise PaddingDataError(
                f"{where}: a parquet file, but rows are read from text. One JSON object per line is needed: {FORMS}."
            ) from error
        raise PaddingDataError(f"{where}: not UTF-8 ({error.reason}). Store the file as UTF-8.") from error
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    # ValueError: also a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise PaddingDataError(f"{where}: not JSON ({error}). One object per line is needed: {FORMS}.") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise PaddingDataError(f"{where}: not an object but {kind}. One object per line is needed: {FORMS}.")
    return value


def _dumped_row(entry: dict[str, Any], number: int, where: str, count_tokens: CountTokens | None) -> RowLine | None:
    """A row of a rollout dump; None for a pad of stock verl."""
    key = _text(entry, "uid", where)
    if key.startswith(PAD_UID_PREFIX):
        return None
    if count_tokens is None:
        raise PaddingDataError(
            f"{where}: a rollout dump holds text and no lengths. Name the model's tokenizer with --tokenizer."
        )
    parts = parts_of_key(key)
    if parts is None:
        raise PaddingDataError(
            f"{where}: uid={_shown(key)}, but the form {KEY_FORM} is needed, as verl writes it: session and index are "
            "whole numbers from 0."
        )
    prompt, session, _ = parts
    asked, answered = _text(entry, "input", where), _text(entry, "output", where)
    return RowLine(
        line=number,
        key=key,
        prompt=prompt,
        session=session_name(prompt, session),
        tokens=max(count_tokens(asked) + count_tokens(answered), 1),
        whole=asked + answered,
        extends=_extends(entry, where),
    )


def _row_of_lengths(entry: dict[str, Any], number: int, where: str, rows_of: dict[tuple[str, int], int]) -> RowLine:
    """A row by its lengths or token ids.

    Args:
        rows_of: rows of each prompt and session so far; this one is counted there.
    """
    prompt, session = _text(entry, "prompt", where), _count(entry, "session", where, least=0)
    index = rows_of.get((prompt, session), 0)
    rows_of[prompt, session] = index + 1
    whole = _token_ids(entry, where) if "token_ids" in entry else None
    told: dict[str, int] = {} if whole is None else {"token_ids": len(whole)}
    if "prompt_tokens" in entry or "response_tokens" in entry:
        # Without a token in the prompt, verl has no log-prob of the first response token.
        parts = _count(entry, "prompt_tokens", where, least=1), _count(entry, "response_tokens", where, least=0)
        told["prompt_tokens and response_tokens"] = sum(parts)
    if "tokens" in entry or not told:
        told["tokens"] = _count(entry, "tokens", where, least=1)
    tokens = next(iter(told.values()))
    if set(told.values()) != {tokens}:
        lengths = ", but by ".join(f"{name} {length}" for name, length in told.items())
        raise PaddingDataError(f"{where}: by {lengths} tokens. Correct the line, or leave one of them out.")
    if tokens > MOST:
        raise PaddingDataError(f"{where}: {tokens} tokens, but at most {MOST} are possible. Correct the line.")
    return RowLine(
        line=number,
        key=row_key(prompt, session, index),
        prompt=prompt,
        session=session_name(prompt, session),
        tokens=tokens,
        whole=whole,
        extends=_extends(entry, where),
    )


def _extends(entry: dict[str, Any], where: str) -> int | None:
    return None if entry.get("extends") is None else _count(entry, "extends", where, least=0)


def _token_ids(entry: dict[str, Any], where: str) -> list[int]:
    ids = entry["token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise PaddingDataError(f"{where}: token_ids={_shown(ids)}, but a list of whole numbers is needed.")
    return ids


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = _value(entry, key, where)
    if not isinstance(value, str):
        raise PaddingDataError(f"{where}: {key}={_shown(value)}, but a string is needed.")
    return value


def _count(entry: dict[str, Any], key: str, where: str, *, least: int) -> int:
    value = _value(entry, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise PaddingDataError(f"{where}: {key}={_shown(value)}, but a whole number from {least} to {MOST} is needed.")
    return value


def _value(entry: dict[str, Any], key: str, where: str) -> Any:
    if key not in entry:
        raise PaddingDataError(f"{where}: no {key!r}. It is needed: {FORMS}.")
    return entry[key]


def _shown(value: Any) -> str:
    """A value as it stands in the file."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} .."
