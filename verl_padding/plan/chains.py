"""Rows that extend each other: what an engine that computes shared prefixes once has to compute.

Row b extends row a when the tokens of a are the first tokens of b. Rows of which each extends the one before are a
chain, and its longest row is the tip. Outputs at a position depend on the tokens up to it, so those of all rows of a
chain are slices of its tip's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.errors import PlanError


def may_extend(tokens_R: Sequence[int], row: int, earlier: int) -> bool:
    """Whether a row may extend another one, as far as lengths tell: of two rows as long, the later one may."""
    return (tokens_R[earlier], earlier) < (tokens_R[row], row)


def check_extensions(key_R: Sequence[str], tokens_R: Sequence[int], extends_R: Sequence[int | None]) -> None:
    """
    Raises:
        PlanError: a row extends itself, a longer row, or one that is not there.
    """
    for row, earlier in enumerate(extends_R):
        if earlier is None:
            continue
        if not 0 <= earlier < len(key_R) or not may_extend(tokens_R, row, earlier):
            of = key_R[earlier] if 0 <= earlier < len(key_R) else None
            raise PlanError(
                f"row {key_R[row]!r} extends row {earlier} ({of!r}): it must be another one, with fewer tokens or with "
                "as many and before it"
            )


def chain_of_rows(extends_R: Sequence[int | None]) -> Int64s:
    """The chain of each row, named by its first row's number.

    A row that two rows extend is in the chain of the first of them; the other one starts a chain of its own.

    >>> chain_of_rows([None, 0, 1, 1, None]).tolist()
    [0, 0, 0, 3, 4]

    Args:
        extends_R: number of the row that each row extends; None for none.
    """
    chain_R = np.arange(len(extends_R), dtype=np.int64)
    extended: set[int] = set()
    # A row is no shorter than the one it extends, but may come before it: look along the whole chain.
    parent_R = [-1] * len(extends_R)
    for row, earlier in enumerate(extends_R):
        if earlier is not None and earlier not in extended:
            extended.add(earlier)
            parent_R[row] = earlier
    for row in range(len(extends_R)):
        path = [row]
        while parent_R[path[-1]] >= 0 and chain_R[path[-1]] == path[-1]:
            path.append(parent_R[path[-1]])
        chain_R[path] = chain_R[path[-1]]  # of the first row, or of one whose chain is known
    return chain_R


def members_of_chains(rows: Sequence[int], chain_R: Int64s, tokens_R: Int64s) -> list[list[int]]:
    """The rows, grouped by chain, each chain's shortest row first; chains in the order of their first row here.

    Args:
        rows: numbers of some real rows, such as those of a mini-batch; a chain may have others elsewhere.
    """
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(int(chain_R[row]), []).append(row)
    return [sorted(chain, key=lambda row: (int(tokens_R[row]), row)) for chain in members.values()]
