"""The rows of a call, cut into mini-batches, and what strategies have in common: even cuts of
rows and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self, TypeVar

import numpy as np

from verl_padding.plan.calls import Update

Unit = TypeVar("Unit")
Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """The real rows of an update, cut into mini-batches; those of a pass are one."""

    rows_M: Sequence[Sequence[int]]
    """Numbers of the real rows of each mini-batch that are computed; none is empty."""
    dropped_M: tuple[tuple[int, ...], ...] = ()
    """Those that are not, of each mini-batch; empty if all are."""
    mini_batch_rows: int | None = None
    """Rows of a mini-batch, pads among them, if the strategy fixes their number."""
    steps: int = 1
    """Optimizer steps that the batch should take; it takes fewer if its rows are too few."""

    def drop(self, zero_advantage: Sequence[int]) -> Self:
        """The same mini-batches, without ``zero_advantage`` rows.

        One of zero-advantage rows alone keeps the first of them: its optimizer step happens all the
        same, and logs what it logs.

        >>> rest = MiniBatches(rows_M=[[0, 1], [2, 3]]).drop([1, 3, 2])
        >>> rest.rows_M, rest.dropped_M
        ([[0], [3]], ((1,), (2,)))
        """
        if not zero_advantage:
            return self
        place = {row: number for number, row in enumerate(zero_advantage)}
        rows_M = [
            [row for row in rows if row not in place] or [min(rows, key=place.__getitem__)]
            for rows in self.rows_M
        ]
        kept = {row for rows in rows_M for row in rows}
        dropped_M = tuple(tuple(row for row in rows if row not in kept) for rows in self.rows_M)
        return replace(self, rows_M=rows_M, dropped_M=dropped_M, mini_batch_rows=None)


def cut_evenly(order: Sequence[int], steps: int, mini_batch_rows: int | None = None) -> MiniBatches:
    """Cuts rows in their order; counts differ by at most one, the larger ones first."""
    parts = np.array_split(np.array(order), min(steps, len(order)))
    rows_M = [part.tolist() for part in parts]
    return MiniBatches(rows_M=rows_M, mini_batch_rows=mini_batch_rows, steps=steps)


def ordered(units: Sequence[Unit], update: Update, seed: int) -> list[Unit]:
    """The units in their order, or in an order drawn with the seed if the update shuffles."""
    if not update.shuffle:
        return list(units)
    permutation = np.random.default_rng(seed).permutation(len(units))
    return [units[unit] for unit in permutation.tolist()]


def even_groups(n_rows_P: Sequence[int], n_groups: int) -> Groups:
    """Groups prompts: groups differ by at most one prompt, and by at most as many rows as the
    largest prompt has.

    Starts from the cut in order, so that prompts of one size stay in order, and exchanges prompts
    between an extreme group and another only while the two come closer.

    Why the bound holds: let the fullest group H have more rows than the emptiest group L by a gap
    larger than any prompt. If H has one prompt more than L, moving any prompt of H to L keeps the
    numbers of prompts within one. Otherwise H has at most as many prompts as L and more rows, so a
    prompt of H is larger than one of L: swap them. Either way the two change by at least one row
    and by less than the gap, so both end strictly between the old extremes. The sum of squares
    falls each time, so the search ends, and it cannot end above the bound.

    Args:
        n_rows_P: rows of each prompt, at least one.
        n_groups: at most the number of prompts.

    Returns:
        Prompts of each group, in ascending order.
    """
    # Prompts of 1, 1, 9 and 9 rows in two groups: in order 2 against 18. Either side has two
    # prompts, so a small one is swapped for a large one: 10 against 10.
    groups = [part.tolist() for part in np.array_split(np.arange(len(n_rows_P)), n_groups)]
    while _exchange_prompts(groups, n_rows_P):
        pass
    return [sorted(group) for group in groups]


def _exchange_prompts(groups: Groups, n_rows_P: Sequence[int]) -> bool:
    """Relieves a fullest group, or feeds an emptiest one: a prompt goes from one group to another,
    and one may come back. False if no exchange brings two groups closer.

    It leaves the two as close as can be: it moves 1 .. gap - 1 rows.
    """
    n_rows_M = [sum(n_rows_P[prompt] for prompt in group) for group in groups]
    emptiest_first = sorted(range(len(groups)), key=n_rows_M.__getitem__)
    fullest, emptiest = emptiest_first[-1], emptiest_first[0]
    pairs = [(fullest, taker) for taker in emptiest_first[:-1]]
    pairs += [(giver, emptiest) for giver in reversed(emptiest_first[1:-1])]
    for giver, taker in pairs:
        gap = n_rows_M[giver] - n_rows_M[taker]
        returns: dict[int, int | None] = {}
        if len(groups[giver]) > len(groups[taker]):  # by one: the two only change roles
            returns[0] = None
        returns |= _first_of_size(groups[taker], n_rows_P)
        exchanges = [
            (abs(gap - 2 * (out_rows - back_rows)), prompt, returned)
            for out_rows, prompt in _first_of_size(groups[giver], n_rows_P).items()
            for back_rows, returned in returns.items()
        ]
        after, prompt, returned = min(exchanges, key=itemgetter(0))
        if after < gap:
            groups[giver].remove(prompt)
            groups[taker].append(prompt)
            if returned is not None:
                groups[taker].remove(returned)
                groups[giver].append(returned)
            return True
    return False


def _first_of_size(group: list[int], n_rows_P: Sequence[int]) -> dict[int, int]:
    """The first prompt of each size in a group; others of that size are as good."""
    first: dict[int, int] = {}
    for prompt in sorted(group):
        first.setdefault(n_rows_P[prompt], prompt)
    return first
