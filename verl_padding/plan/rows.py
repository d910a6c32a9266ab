"""The real rows of a batch, as the planner sees them, and the chains of rows that extend each other.

Row b extends row a when the tokens of a are the first tokens of b. Rows of which each extends the one before are a
chain, and its longest row is the tip. Outputs at a position depend on the tokens up to it, so those of all rows of a
chain are slices of its tip's: an engine that computes shared prefixes once computes the tip alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.errors import PlanError
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import KEY_FORM, parts_of_key, session_name

MOST_TOKENS = 1 << 26
"""Most tokens that a row may have: beyond every model's context, yet their square is a cost that fits int64."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The real rows of a batch: column by column, one entry per row, in the order of the batch."""

    key_R: tuple[str, ...]
    """Name of each row; no two are alike."""
    prompt_R: tuple[str, ...]
    """Prompt (``uid``) that each row answers."""
    session_R: tuple[str, ...]
    """Rollout that each row is a part of, named ``{uid}_{session}``."""
    tokens_R: tuple[int, ...]
    """Tokens of prompt and response together."""
    extends_R: tuple[int | None, ...] | None = None
    """Number of the row that each row extends, None for none: its tokens are the first tokens of this one. None if it
    is not known."""

    forest: Forest | None = None
    """What rows share that part; None if it is not known."""
    idle: tuple[int, ...] = ()
    """Numbers of rows that add nothing to the gradient of an update with ``skips_idle``; those first that it computes
    where a mini-batch has no others."""

    def shared(self, *, trees: bool) -> Forest | None:
        """What is computed once: what whole rows share or, with ``trees``, rows that part; None for nothing."""
        forest = self.forest
        if self.extends_R is not None and not (trees and forest is not None):
            forest = Forest.of_chains(np.array(self.tokens_R, dtype=np.int64), chain_of_rows(self.extends_R))
        elif forest is not None and not trees:
            forest = forest.chains()
        return forest if forest is not None and forest.saves else None

    def __post_init__(self) -> None:
        n_rows = len(self.key_R)
        for name in ("prompt_R", "session_R", "tokens_R", "extends_R"):
            column = getattr(self, name)
            if column is not None and len(column) != n_rows:
                raise PlanError(f"{name} has {len(column)} entries for {n_rows} rows: one each is needed")
        seen: set[str] = set()
        for key, tokens in zip(self.key_R, self.tokens_R, strict=True):
            if key in seen:
                raise PlanError(f"row {key!r} is in the batch twice: every key must be there once")
            seen.add(key)
            if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MOST_TOKENS:
                raise PlanError(f"row {key!r} has {tokens!r} tokens: a whole number from 1 to {MOST_TOKENS} is needed")
        if len(set(self.idle)) < len(self.idle) or not set(self.idle) <= set(range(n_rows)):
            raise PlanError(f"idle={list(self.idle)}: numbers of rows from 0 to {n_rows - 1} are needed, each once")
        for row, earlier in enumerate(self.extends_R or ()):
            if earlier is None:
                continue
            exists = 0 <= earlier < n_rows
            if not exists or not may_extend(self.tokens_R, row, earlier):
                raise PlanError(
                    f"row {self.key_R[row]!r} extends row {earlier} ({self.key_R[earlier] if exists else None!r}): it "
                    "must be another one, with fewer tokens or with as many and before it"
                )

    def __len__(self) -> int:
        return len(self.key_R)

    @classmethod
    def from_keys(
        cls,
        keys: Iterable[str],
        tokens: Iterable[SupportsIndex],
        extends: Iterable[int | None] | None = None,
        forest: Forest | None = None,
        idle: Iterable[int] = (),
    ) -> Rows:
        """Reads prompt and session from keys of the form ``{uid}_{session}_{index}``.

        Args:
            tokens: tokens of each row; whole numbers of any kind, NumPy's as well.
            extends: number of the row that each row extends, see ``extends_R``.
            forest: what rows share that part.
            idle: rows that add nothing to a gradient, see ``idle``.

        >>> Rows.from_keys(["math_7_0_1"], [512]).prompt_R
        ('math_7',)

        Raises:
            PlanError: a key has another form or comes twice, there is not one number of tokens per key, or a number is
                not whole, below 1 or beyond ``MOST_TOKENS``, or a row extends none that it can.
        """
        key_R = tuple(keys)
        prompt_R, session_R = [], []
        for key in key_R:
            parts = parts_of_key(key)
            if parts is None:
                raise PlanError(
                    f"row {key!r}: not of the form {KEY_FORM}, where session and index are whole numbers from 0"
                )
            uid, session, _ = parts
            prompt_R.append(uid)
            session_R.append(session_name(uid, session))
        return cls(
            key_R=key_R,
            prompt_R=tuple(prompt_R),
            session_R=tuple(session_R),
            tokens_R=tuple(_as_int(length) for length in tokens),
            extends_R=None if extends is None else tuple(extends),
            forest=forest,
            idle=tuple(idle),
        )


def _as_int(tokens: Any) -> Any:
    """A whole number of any kind as an int; anything else as it is, to be refused with its key."""
    return tokens if isinstance(tokens, bool) or not hasattr(tokens, "__index__") else operator.index(tokens)


def may_extend(tokens_R: Sequence[int], row: int, earlier: int) -> bool:
    """Whether a row may extend another one, as far as lengths tell: of two rows as long, the later one may."""
    return (tokens_R[earlier], earlier) < (tokens_R[row], row)


def chain_of_rows(extends_R: Sequence[int | None]) -> Int64s:
    """The chain of each row, named by its first row's number.

    A row that two rows extend is in the chain of the first of them; the other one starts a chain of its own.

    >>> chain_of_rows([None, 0, 1, 1, None]).tolist()
    [0, 0, 0, 3, 4]

    Args:
        extends_R: number of the row that each row extends; None for none.
    """
    chain_R = np.arange(len(extends_R), dtype=np.int64)
    parent_R = [-1] * len(extends_R)
    extended: set[int] = set()
    for row, earlier in enumerate(extends_R):
        if earlier is not None and earlier not in extended:
            extended.add(earlier)
            parent_R[row] = earlier
    # A row is no shorter than the one it extends, but may come before it: look along the whole chain.
    for row in range(len(extends_R)):
        path = [row]
        while parent_R[path[-1]] >= 0 and chain_R[path[-1]] == path[-1]:
            path.append(parent_R[path[-1]])
        chain_R[path] = chain_R[path[-1]]  # of the first row, or of one whose chain is known
    return chain_R
