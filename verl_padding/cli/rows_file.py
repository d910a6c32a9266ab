"""Reads a batch's rows from a file of their lengths, or from a rollout dump of verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import MOST_TOKENS, Rows
from verl_padding.plan.row_keys import KEY_FORM, parts_of_key, row_key, session_name

CountTokens = Callable[[str], int]

MOST = MOST_TOKENS
"""A larger number of tokens, or number of a session, is a mistake."""


@dataclass(frozen=True, kw_only=True)
class RowsFile:
    """What a file says of a batch."""

    rows: Rows
    lines_R: tuple[int, ...]
    """Number of each row in the file, from 0; pads of stock verl are counted too, though they are left out."""
    pads: int
    """Pads of stock verl in a rollout dump, left out."""
    counted: bool
    """Whether the lengths are an estimate: a tokenizer's counts of a dump's text."""


def read_rows_file(path: Path, count_tokens: CountTokens | None) -> RowsFile:
    """Reads one JSON object per line.

    Either ``{"prompt": str, "session": int, "tokens": int}``, or ``prompt_tokens`` and ``response_tokens`` instead of
    ``tokens``; or a line of a dump (``trainer.rollout_data_dir``): ``uid`` (the row's key), ``input`` and ``output``.

    Args:
        count_tokens: counts the tokens of a text; needed for a rollout dump.

    Raises:
        PaddingDataError: a line is none of these (its number is given), or there is no row at all.
    """
    keys: list[str] = []
    prompts: list[str] = []
    sessions: list[str] = []
    tokens: list[int] = []
    lines: list[int] = []
    met: dict[tuple[str, int], int] = {}
    pads = number = 0
    counted = False
    for where, line in _objects(path):
        if "uid" in line and "prompt" not in line:
            counted = True
            key = _text(line, "uid", where)
            if key.startswith(PAD_UID_PREFIX):
                pads += 1
                number += 1
                continue
            if count_tokens is None:
                raise PaddingDataError(
                    f"{where}: a rollout dump holds text and no lengths. Name the model's tokenizer with --tokenizer."
                )
            parts = parts_of_key(key)
            if parts is None:
                raise PaddingDataError(
                    f"{where}: uid={key!r}, but the form {KEY_FORM} is needed, as verl writes it: "
                    "session and index are whole numbers from 0."
                )
            prompt, session, _ = parts
            length = count_tokens(_text(line, "input", where)) + count_tokens(_text(line, "output", where))
        else:
            prompt, session = _text(line, "prompt", where), str(_count(line, "session", where, least=0))
            if "tokens" in line:
                length = _count(line, "tokens", where, least=1)
            else:
                length = sum(_count(line, f"{part}_tokens", where, least=0) for part in ("prompt", "response"))
            index = met.get((prompt, int(session)), 0)
            met[prompt, int(session)] = index + 1
            key = row_key(prompt, session, index)
        keys.append(key)
        prompts.append(prompt)
        sessions.append(session_name(prompt, session))
        tokens.append(max(length, 1))
        lines.append(number)
        number += 1
    if not keys:
        raise PaddingDataError(f"{path}: holds no row. One JSON object per line is needed.")
    rows = Rows(key_R=tuple(keys), prompt_R=tuple(prompts), session_R=tuple(sessions), tokens_R=tuple(tokens))
    return RowsFile(rows=rows, lines_R=tuple(lines), pads=pads, counted=counted)


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        # newline="\n": verl does not escape U+2028 and its like, at which other readers break lines.
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    value = json.loads(line)
                # ValueError: also a number of thousands of digits.
                except (ValueError, RecursionError) as error:
                    raise PaddingDataError(f"{where}: not JSON ({error}). One object per line is needed.") from error
                if not isinstance(value, dict):
                    kind = type(value).__name__
                    raise PaddingDataError(f"{where}: not an object but {kind}. One object per line is needed.")
                yield where, value
    except (OSError, UnicodeDecodeError) as error:
        raise PaddingDataError(
            f"{path}: cannot be read ({error}). Name a file of rows, one JSON object per line."
        ) from error


def _text(line: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(line.get(key), str):
        raise PaddingDataError(f"{where}: {key}={line.get(key)!r}, but a string is needed.")
    return str(line[key])


def _count(line: dict[str, Any], key: str, where: str, *, least: int) -> int:
    value = line.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PaddingDataError(f"{where}: {key}={value!r}, but a whole number of at least {least} is needed.")
    if value > MOST:
        raise PaddingDataError(f"{where}: {key}={value}, but a whole number of at most {MOST} is needed.")
    return value
