"""Rows of a batch that begin alike: what an engine that computes shared beginnings once has to
compute. The trie of a micro-batch, for workers, is in ``prefix_sharing/prefix_trie.py``.

Sorted so that the longer of two rows that begin alike comes first, each row shares most with the
row before it: rows are the branches of tries, written down with two whole numbers a row. Two rows
that are not neighbours in that order share the minimum of what neighbours share from the first to
the second. Each token of a trie is computed once, but for the last one before two rows branch: its
output is compared with another next token on each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_padding.plan.cost import Int64s

MIN_SHARED_TOKENS = 2
"""Tokens from which on sharing saves any: the last one of them is computed again."""


def cached_tokens(shared_I: Int64s, tokens_I: Int64s) -> Int64s:
    """How many tokens of each row are computed in the row before it: all, or those that they share
    but for the last."""
    return np.where(
        shared_I == tokens_I, tokens_I, np.where(shared_I >= MIN_SHARED_TOKENS, shared_I - 1, 0)
    )


def common_prefix_length(one: NDArray[Any], other: NDArray[Any]) -> int:
    """How many of the first entries of two arrays, (length, ..) each, are equal.

    >>> common_prefix_length(np.array([5, 6, 7]), np.array([5, 6, 4, 4]))
    2
    """
    # argmax finds the first place that differs, and 0 where none does.
    length = min(len(one), len(other))
    if not length or one.shape[1:] != other.shape[1:]:
        return 0
    differ = (one[:length] != other[:length]).reshape(length, -1).any(axis=1)
    first = int(differ.argmax())
    return first if differ[first] else length


@dataclass(frozen=True, kw_only=True)
class PrefixTries:
    """The rows of a batch in the order of their tries.

    Rows [5, 6, 7, 8], [5, 6, 7, 9, 9] and [5, 6] have the order 1, 0, 2: ``dfs_position_R`` is [1,
    0, 2], and ``shared_R`` [3, 0, 2].
    """

    tokens_R: Int64s
    """Tokens of each row."""

    dfs_position_R: Int64s
    """Place of each row in the order."""

    shared_R: Int64s
    """How many of its first tokens a row shares with the row at the place before; 0 for the
    first."""

    whole_rows_only: bool = False
    """Whether what is computed once are rows that another one begins with, and nothing of rows that
    branch."""

    @classmethod
    def in_order(
        cls,
        tokens_R: Sequence[int] | Int64s,
        order: Sequence[int] | Int64s,
        shared_I: Sequence[int] | Int64s,
    ) -> PrefixTries:
        """
        Args:
            order: the rows' numbers.
            shared_I: what each, in that order, shares with the row before it.
        """
        dfs_position_R, shared_R = np.zeros((2, len(tokens_R)), dtype=np.int64)
        dfs_position_R[order], shared_R[order] = np.arange(len(order)), shared_I
        return cls(
            tokens_R=np.array(tokens_R, dtype=np.int64),
            dfs_position_R=dfs_position_R,
            shared_R=shared_R,
        )

    @classmethod
    def from_tokens(
        cls, ids_R: Sequence[Int64s], group_R: Sequence[str] | None = None
    ) -> PrefixTries:
        """The tries of rows with these token ids, (tokens,) each.

        >>> rows = [5, 6, 7, 8], [5, 6, 7, 9, 9], [5, 6]
        >>> tries = PrefixTries.from_tokens([np.array(ids) for ids in rows])
        >>> tries.dfs_position_R.tolist(), tries.shared_R.tolist()
        ([1, 0, 2], [3, 0, 2])

        Args:
            group_R: rows of different groups share nothing.
        """
        groups = group_R or [""] * len(ids_R)
        # Big-endian bytes of ids that are not negative sort as the ids do. Sorted downwards, a row
        # shares most with the one before it, and comes before its own beginnings.
        bytes_R = [ids.astype(">i8").tobytes() for ids in ids_R]
        order = sorted(
            range(len(ids_R)), key=lambda row: (groups[row], bytes_R[row], row), reverse=True
        )
        shared_R = np.zeros(len(ids_R), dtype=np.int64)
        for before, row in pairwise(order):
            if groups[before] == groups[row]:
                shared_R[row] = common_prefix_length(ids_R[before], ids_R[row])
        return cls.in_order(list(map(len, ids_R)), order, shared_R[order])

    @cached_property
    def _shared_in_order(self) -> Int64s:
        """What the row at each place shares with the one before it; and an end, 0."""
        return np.append(self.shared_R[np.argsort(self.dfs_position_R)], 0)

    def shared_among(self, rows: Int64s, group_I: Int64s | None = None) -> tuple[Int64s, Int64s]:
        """Which of some rows comes first, next and so on, and how many tokens each may share with
        the one before it: with full-prefix sharing only, all of its own, or none.

        Args:
            group_I: of each of the rows; rows of different groups share nothing, and groups come
                one after the other.
        """
        # Of rows that share 0, 5, 2 and 4 with the one before, the first and the last alone: with
        # the two between them left out, the last one shares min(5, 2, 4) = 2 with the first.
        dfs_position_I = self.dfs_position_R[rows]
        order = (
            np.argsort(dfs_position_I) if group_I is None else np.lexsort((dfs_position_I, group_I))
        )
        # From place 0 to 3 it is the minimum of the places from 1 to before 4.
        minima = np.minimum.reduceat(self._shared_in_order, dfs_position_I[order] + 1)
        shared_I = np.append(0, minima)[: len(order)]
        if group_I is not None:
            shared_I[1:][np.diff(group_I[order]) != 0] = 0
        if self.whole_rows_only:
            # Not before the minimum: a row that branches off both may be between a row and one that
            # it begins.
            shared_I[shared_I < self.tokens_R[rows[order]]] = 0
        return order, shared_I

    @property
    def has_branches(self) -> bool:
        """Whether any rows share a token that need not be computed again, and then branch."""
        branches_R = (self.shared_R >= MIN_SHARED_TOKENS) & (self.shared_R < self.tokens_R)
        return bool(branches_R.any()) and not self.whole_rows_only

    @property
    def has_shared_tokens(self) -> bool:
        """Whether any rows share a token that need not be computed again."""
        return self.has_branches or bool((self.shared_R == self.tokens_R).any())

    def segments(self, rows: Int64s, batch_I: Int64s) -> tuple[Int64s, Int64s]:
        """Which of some rows are computed, and the first token of each that is; ``batch_I`` is the
        micro-batch of each."""
        # [5, 6, 7, 9, 9], [5, 6, 7, 8] and [5, 6], in this order, share 0, 3 and 2 tokens: 0, 2 and
        # 2 of them are computed in the row before, since the 7 is computed on each branch. So the
        # third row is not computed at all, and the second one from its token 2 on.
        order, shared_I = self.shared_among(rows, batch_I)
        cached_I = cached_tokens(shared_I, self.tokens_R[rows[order]])
        computed = cached_I < self.tokens_R[rows[order]]
        return order[computed], cached_I[computed]
