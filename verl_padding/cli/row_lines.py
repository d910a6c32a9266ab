"""The lines of a file of rows: where they stand, and which of them begins with which other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from verl_padding.errors import PaddingDataError
from verl_padding.plan.chains import may_extend


class RowLine(NamedTuple):
    """A row, as a line of a file has it."""

    line: int
    """Number of the line, from 0."""
    key: str
    prompt: str
    session: str
    """Name of the session, ``{uid}_{session}``."""
    tokens: int
    whole: str | list[int] | None
    """Its text or token ids, prompt and response, if the file has them."""
    extends: int | None
    """Number of the line, from 0, of the row that this one extends, if the file says so."""


def place(name: str, line: int) -> str:
    """
    >>> place("rows.jsonl", 2)
    'rows.jsonl, line 3 (row number 2)'

    Args:
        line: from 0, as ``extends`` and the JSON of a plan number rows.
    """
    return f"{name}, {in_line(line)}"


def in_line(line: int) -> str:
    """
    >>> in_line(2)
    'line 3 (row number 2)'
    """
    return f"line {line + 1} (row number {line})"


def extended_rows(
    found: Sequence[RowLine], *, name: str, pads: Collection[int], n_lines: int
) -> tuple[int | None, ...] | None:
    """Number among ``found`` of the row that each row extends; None if the file tells nothing about that.

    What a line says of itself comes first; otherwise, texts or token ids of the rows of a session are compared.

    Args:
        pads: lines of pads of stock verl.
        n_lines: lines of the file.

    Raises:
        PaddingDataError: a row extends one that it cannot extend.
    """
    if all(row.whole is None and row.extends is None for row in found):
        return None
    row_of_line = {row.line: number for number, row in enumerate(found)}
    extends_R = _by_their_tokens(found)
    for number, row in enumerate(found):
        if row.extends is None:
            continue
        earlier = row_of_line.get(row.extends)
        why = _no_row(row.extends, pads, n_lines) if earlier is None else _cannot_extend(found, number, earlier)
        if why:
            raise PaddingDataError(
                f"{place(name, row.line)}: extends={row.extends}, but {why}. Give the row number of a row of the same "
                "session that this one begins with, or leave extends out."
            )
        extends_R[number] = earlier
    return tuple(extends_R)


def _no_row(line: int, pads: Collection[int], n_lines: int) -> str:
    if line >= n_lines:
        return f"the last line is {in_line(n_lines - 1)}"
    return f"{in_line(line)} is {'a pad of stock verl' if line in pads else 'blank'}"


def _cannot_extend(found: Sequence[RowLine], number: int, earlier: int) -> str | None:
    """Why a row cannot extend another one; None if it can."""
    row, other = found[number], found[earlier]
    it = in_line(other.line)
    if number == earlier:
        return f"{it} is this row itself"
    if row.session != other.session:
        return f"{it} is of session {other.session!r}, and this row of session {row.session!r}"
    if other.tokens > row.tokens:
        return f"{it} has {other.tokens} tokens, more than the {row.tokens} of this row"
    if other.tokens == row.tokens and earlier > number:
        return f"{it} has {other.tokens} tokens as this row has, and comes after it"
    if not _begins_with(row, other):
        return f"this row does not begin with what {it} holds"
    return None


def _begins_with(row: RowLine, earlier: RowLine) -> bool:
    """Whether a row begins with another one; True if one of them has lengths alone, or text where the other has ids."""
    if row.whole is None or earlier.whole is None or type(row.whole) is not type(earlier.whole):
        return True
    return row.whole[: len(earlier.whole)] == earlier.whole


def _by_their_tokens(found: Sequence[RowLine]) -> list[int | None]:
    """Number of the row that each row extends, by text or token ids, among the rows of its session."""
    extends_R: list[int | None] = [None] * len(found)
    tokens_R = [row.tokens for row in found]
    rows_of: dict[tuple[str, type], list[int]] = {}
    for number, row in enumerate(found):
        if row.whole:
            rows_of.setdefault((row.session, type(row.whole)), []).append(number)
    for rows in rows_of.values():
        # In this order the rows that begin with a row come right after it.
        before: list[int] = []
        for longer in sorted(rows, key=lambda number: (found[number].whole, number)):
            while before and not _begins_with(found[longer], found[before[-1]]):
                before.pop()
            # By the tokenizer's counts, a text may have fewer tokens than its beginning.
            extends_R[longer] = next(
                (earlier for earlier in before[::-1] if may_extend(tokens_R, longer, earlier)), None
            )
            before.append(longer)
    return extends_R
