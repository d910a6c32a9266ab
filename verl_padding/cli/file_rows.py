"""The rows of a file, and what they begin with alike: by what they say, by their token ids, or by their texts."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from verl_padding.cli.first_difference import first_difference
from verl_padding.errors import PaddingDataError
from verl_padding.plan import PlanError
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import session_of_key, uid_of_key
from verl_padding.plan.rows import may_extend

CountTokens = Callable[[str], int]


class FileRow(NamedTuple):
    """A row as a file has it."""

    line: int
    key: str
    tokens: Any  # `Rows` refuses what is not a whole number
    whole: str | bytes | None  # text, or packed token ids, of prompt and response, if the file has them
    extends: int | None  # line of the row that this one extends, if the file has it
    shares: int | None = None  # tokens that this row shares with the one on the line before, if the file has it
    reward: float | None = None  # of its session, if the file has it


def extended_rows(found: Sequence[FileRow], name: str) -> list[int | None] | None:
    """Number of the row that each row extends, by ``extends`` or else by its tokens; None if the file has neither."""
    if all(row.whole is None and row.extends is None for row in found):
        return None
    row_of_line = {row.line: place for place, row in enumerate(found)}
    extends_R = _by_their_tokens(found)
    for at, row in enumerate(found):
        if row.extends is None:
            continue
        earlier = row_of_line.get(row.extends)
        if earlier is None or session_of_key(found[earlier].key) != session_of_key(row.key):
            why = f"extends={row.extends}, but that is not the number of a row of its session."
            raise PaddingDataError(f"{place_of(name, row.line)}: {why}")
        extends_R[at] = earlier
    return extends_R


def forest_of(found: Sequence[FileRow], tokens_R: Sequence[int], count_tokens: CountTokens | None) -> Forest | None:
    """What rows of a prompt share, by ``shares``, or else by their tokens or texts; None if the file has neither."""
    if any(row.shares is not None for row in found):
        # From the last line to the first: a row comes before those that it extends.
        for place, (above, line) in enumerate(pairwise(found)):
            shares = 0 if line.shares is None else line.shares
            of_one_prompt = uid_of_key(above.key) == uid_of_key(line.key)
            most = min(tokens_R[place : place + 2]) if of_one_prompt else 0
            if not isinstance(shares, int) or isinstance(shares, bool) or not 0 <= shares <= most:
                raise PlanError(f"row number {line.line}: shares={shares!r} must be a whole number from 0 to {most}")
        shared_I = [0, *[row.shares or 0 for row in reversed(found)]]
        return Forest.in_order(tokens_R, range(len(found))[::-1], shared_I[:-1])
    if any(row.whole is None for row in found):
        return None
    # Rows of text and rows of token ids cannot be compared.
    kind_R = [(uid_of_key(row.key), isinstance(row.whole, str)) for row in found]
    order = sorted(range(len(found)), key=lambda row: (kind_R[row], found[row].whole), reverse=True)
    shared_I = [0]
    for before, row in pairwise(order):
        one, other = found[before].whole or "", found[row].whole or ""
        if kind_R[before] != kind_R[row]:
            shared_I.append(0)
        elif one[: len(other)] == other:
            shared_I.append(min(tokens_R[row], tokens_R[before]))
        else:
            alike = _alike(one, other)
            # Of a text, the token at which rows part may begin before it.
            tokens = count_tokens(other[:alike]) - 1 if count_tokens and isinstance(other, str) else alike
            shared_I.append(min(max(tokens, 0), tokens_R[row] - 1, tokens_R[before]))
    return Forest.in_order(tokens_R, order, shared_I)


def _alike(one: str | bytes, other: str | bytes) -> int:
    """How many characters of two texts, or ids of two rows, are equal up to where they part."""
    if isinstance(one, bytes) and isinstance(other, bytes):
        return first_difference(one, other) // 4
    return first_difference(str(one), str(other))


def _by_their_tokens(found: Sequence[FileRow]) -> list[int | None]:
    extends_R: list[int | None] = [None] * len(found)
    tokens_R = [row.tokens for row in found]
    rows_of: dict[tuple[str, type], list[tuple[Any, int]]] = {}
    for number, row in enumerate(found):
        if row.whole:
            rows_of.setdefault((session_of_key(row.key), type(row.whole)), []).append((row.whole, number))
    for rows in rows_of.values():
        # In this order the rows that begin with a row come right after it.
        before: list[tuple[Any, int]] = []
        for whole, longer in sorted(rows):
            while before and whole[: len(before[-1][0])] != before[-1][0]:
                before.pop()
            # By the tokenizer's counts, a text may have fewer tokens than its beginning.
            extended = (earlier for _, earlier in reversed(before) if may_extend(tokens_R, longer, earlier))
            extends_R[longer] = next(extended, None)
            before.append((whole, longer))
    return extends_R


def place_of(name: str, line: int) -> str:
    """Names a line, which is given from 0, as ``extends`` and the JSON of a plan number rows."""
    return f"{name}, line {line + 1} (row number {line})"
