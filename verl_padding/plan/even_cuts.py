"""Cuts rows, and whole prompts, into parts that hold nearly the same number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Groups = list[list[int]]


def even_ranges(n_items: int, n_parts: int) -> list[range]:
    """Cuts items in their order; sizes differ by at most one, the larger ones first.

    >>> even_ranges(5, 2)
    [range(0, 3), range(3, 5)]
    """
    size, rest = divmod(n_items, n_parts)
    ends = [part * size + min(part, rest) for part in range(n_parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def even_groups(n_rows_P: Sequence[int], n_groups: int) -> Groups:
    """Groups prompts: groups differ by at most one prompt, and by at most as many rows as the largest prompt has.

    Starts from the cut in order, so that prompts of one size stay in order, and exchanges prompts between an
    extreme group and another only while the two come closer.

    Why the bound holds: let the fullest group H have more rows than the emptiest group L by a gap larger than any
    prompt. If H has one prompt more than L, moving any prompt of H to L keeps the numbers of prompts within one.
    Otherwise H has at most as many prompts as L and more rows, so a prompt of H is larger than one of L: swap them.
    Either way the two change by at least one row and by less than the gap, so both end strictly between the old
    extremes. The sum of squares falls each time, so the search ends, and it cannot end above the bound.

    Args:
        n_rows_P: rows of each prompt, at least one.
        n_groups: at most the number of prompts.

    Returns:
        Prompts of each group, in ascending order.
    """
    groups = [list(prompts) for prompts in even_ranges(len(n_rows_P), n_groups)]
    n_rows_M = [sum(n_rows_P[prompt] for prompt in group) for group in groups]
    while True:
        exchange = _find_exchange(groups, n_rows_M, n_rows_P)
        if exchange is None:
            return [sorted(group) for group in groups]
        giver, prompt, taker, returned = exchange
        groups[giver].remove(prompt)
        groups[taker].append(prompt)
        change = n_rows_P[prompt]
        if returned is not None:
            groups[taker].remove(returned)
            groups[giver].append(returned)
            change -= n_rows_P[returned]
        n_rows_M[giver] -= change
        n_rows_M[taker] += change


def _find_exchange(
    groups: Groups, n_rows_M: list[int], n_rows_P: Sequence[int]
) -> tuple[int, int, int, int | None] | None:
    """An exchange that relieves a fullest group or feeds an emptiest one: giver, prompt, taker, prompt returned."""
    by_rows = sorted(range(len(groups)), key=lambda group: n_rows_M[group])
    fullest, emptiest = by_rows[-1], by_rows[0]
    pairs = [(fullest, taker) for taker in by_rows[:-1]]
    pairs += [(giver, emptiest) for giver in reversed(by_rows[1:-1])]
    for giver, taker in pairs:
        may_move = len(groups[giver]) > len(groups[taker])  # by one: the two only change roles
        found = _closest(groups[giver], groups[taker], n_rows_M[giver] - n_rows_M[taker], n_rows_P, may_move)
        if found is not None:
            return giver, found[0], taker, found[1]
    return None


def _closest(
    giver: list[int], taker: list[int], gap: int, n_rows_P: Sequence[int], may_move: bool
) -> tuple[int, int | None] | None:
    """The exchange that leaves two groups closest, if they end closer than they are: it moves 1 .. gap - 1 rows."""
    out, back = _first_of_size(giver, n_rows_P), _first_of_size(taker, n_rows_P)
    best, found = gap, None
    for out_rows, prompt in out.items():
        returns: list[tuple[int, int | None]] = [(0, None)] if may_move else []
        returns += back.items()
        for back_rows, returned in returns:
            after = abs(gap - 2 * (out_rows - back_rows))
            if after < best:
                best, found = after, (prompt, returned)
    return found


def _first_of_size(group: list[int], n_rows_P: Sequence[int]) -> dict[int, int]:
    """The first prompt of each size in a group; others of that size are as good."""
    first: dict[int, int] = {}
    for prompt in sorted(group):
        first.setdefault(n_rows_P[prompt], prompt)
    return first
