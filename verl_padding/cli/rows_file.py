"""Reads a batch's rows from a file of their lengths, or from a rollout dump of verl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan import MOST_TOKENS, Rows
from verl_padding.plan.chains import may_extend
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
    A row of the first two kinds may say which row it extends, ``"extends": <its line, from 0>``, or bring ``token_ids``
    instead of lengths; then, as in a dump, rows of a session are compared.

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
    named: list[tuple[str, int | None]] = []
    wholes: list[str | list[int] | None] = []
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
            asked, answered = _text(line, "input", where), _text(line, "output", where)
            length = count_tokens(asked) + count_tokens(answered)
            whole: str | list[int] | None = asked + answered
        else:
            prompt, session = _text(line, "prompt", where), str(_count(line, "session", where, least=0))
            whole = None
            if "token_ids" in line:
                whole = _token_ids(line, where)
                length = len(whole)
            elif "tokens" in line:
                length = _count(line, "tokens", where, least=1)
            else:
                length = sum(_count(line, f"{part}_tokens", where, least=0) for part in ("prompt", "response"))
            index = met.get((prompt, int(session)), 0)
            met[prompt, int(session)] = index + 1
            key = row_key(prompt, session, index)
        named.append((where, _count(line, "extends", where, least=0) if line.get("extends") is not None else None))
        wholes.append(whole)
        keys.append(key)
        prompts.append(prompt)
        sessions.append(session_name(prompt, session))
        tokens.append(max(length, 1))
        lines.append(number)
        number += 1
    if not keys:
        raise PaddingDataError(f"{path}: holds no row. One JSON object per line is needed.")
    extends = _extensions(sessions, wholes, tokens)
    row_of_line = {line: row for row, line in enumerate(lines)}
    for row, (where, extended) in enumerate(named):
        if extended is not None:
            earlier = row_of_line.get(extended)
            if earlier is None or not may_extend(tokens, row, earlier):
                raise PaddingDataError(
                    f"{where}: extends={extended}, but the line of a row with fewer tokens is needed, or of one with "
                    "as many before it; lines are counted from 0."
                )
            begin, whole = wholes[earlier], wholes[row]
            if begin is not None and whole is not None and whole[: len(begin)] != begin:
                raise PaddingDataError(
                    f"{where}: extends={extended}, but it does not begin with that line's tokens. Name another line, "
                    "or leave extends out."
                )
            extends[row] = earlier
    known = any(whole is not None for whole in wholes) or any(extended is not None for _, extended in named)
    rows = Rows(
        key_R=tuple(keys),
        prompt_R=tuple(prompts),
        session_R=tuple(sessions),
        tokens_R=tuple(tokens),
        extends_R=tuple(extends) if known else None,
    )
    return RowsFile(rows=rows, lines_R=tuple(lines), pads=pads, counted=counted)


def _extensions(
    session_R: Sequence[str], whole_R: Sequence[str | list[int] | None], tokens_R: Sequence[int]
) -> list[int | None]:
    """Number of the row that each row extends, by text or token ids, among the rows of its session."""
    extends_R: list[int | None] = [None] * len(session_R)
    rows_of: dict[tuple[str, type], list[int]] = {}
    for row, session in enumerate(session_R):
        if whole_R[row]:
            rows_of.setdefault((session, type(whole_R[row])), []).append(row)
    for rows in rows_of.values():
        # In this order a row comes right before one that extends it, if there is any.
        order = sorted(rows, key=lambda row: (whole_R[row], row))
        for shorter, longer in pairwise(order):
            begin, whole = whole_R[shorter], whole_R[longer]
            # By the tokenizer's counts, a text may have fewer tokens than its beginning.
            follows = may_extend(tokens_R, longer, shorter)
            if begin is not None and whole is not None and whole[: len(begin)] == begin and follows:
                extends_R[longer] = shorter
    return extends_R


def _token_ids(line: dict[str, Any], where: str) -> list[int]:
    ids = line["token_ids"]
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise PaddingDataError(f"{where}: token_ids={str(ids)[:40]}, but a list of whole numbers is needed.")
    return ids


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
