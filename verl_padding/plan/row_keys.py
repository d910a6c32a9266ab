"""The form of a row's key in TransferQueue, as verl 0.9 writes it: ``{uid}_{session}_{index}``."""

import re
from collections.abc import Iterable


def row_key(uid: str, session: int | str, index: int) -> str:
    """``math_7_0_1`` is row 1 of session 0 of the prompt ``math_7``."""
    return f"{uid}_{session}_{index}"


def session_of_key(key: str) -> str:
    """``math_7_0`` of ``math_7_0_1``"""
    return key.rsplit("_", 1)[0]


def uid_of_key(key: str) -> str:
    """``math_7`` of ``math_7_0_1``"""
    return key.rsplit("_", 2)[0]


def index_of_key(key: str) -> int:
    """Place of a row in its session: 1 of ``math_7_0_1``."""
    return int(key.rsplit("_", 1)[1])


def rows_of_sessions(keys: Iterable[str]) -> list[list[int]]:
    """Numbers of the rows of each session, in the order of their indexes; sessions in the order of
    their first rows.

    >>> rows_of_sessions(["a_0_10", "b_0_0", "a_0_2"])
    [[2, 0], [1]]
    """
    keys = list(keys)
    sessions = rows_by_name(map(session_of_key, keys)).values()
    return [sorted(rows, key=lambda row: index_of_key(keys[row])) for rows in sessions]


def rows_by_name(name_R: Iterable[str]) -> dict[str, list[int]]:
    """Numbers of the rows of each name, in the order of first rows."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(name_R):
        rows_of.setdefault(name, []).append(row)
    return rows_of


def parts_of_key(key: str) -> tuple[str, str, str] | None:
    """uid, session and index of a row's key; None for a key of another form.

    >>> parts_of_key("math_7_0_1")
    ('math_7', '0', '1')
    """
    parts = re.fullmatch(r"(.+)_([0-9]+)_([0-9]+)", key, re.DOTALL)
    return (parts[1], parts[2], parts[3]) if parts else None
