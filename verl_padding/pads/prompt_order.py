"""Prompt ids that carry the order of the data set, and rows put in that order.

verl gives each prompt that its data loader yields a random uid, and the rows of a prompt come back when their sessions
end. So nothing in a batch says which prompt comes first in the data set. A uid of this module does: it begins with the
step that fetched the prompt and its place among the prompts of that step, so that uids sort as the data set is read.
The rest is random, as in any UUID: two jobs may share a TransferQueue.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence

from verl_padding.plan.row_keys import parts_of_key

STEP_BITS, PLACE_BITS = 28, 20
_MARK = 0x9AD
"""The twelve bits between version and variant: a version 8 UUID from elsewhere most likely has others."""


def ordered_uid(step: int, place: int) -> str:
    """A UUID of version 8 (RFC 9562, 5.8) that says when its prompt was fetched.

    Args:
        step: step of the trainer, below 2^28.
        place: place among the prompts fetched in that step, from 0, below 2^20.

    >>> ordered_uid(3, 17)[:19]
    '00000030-0011-89ad-'
    """
    assert 0 <= step < 1 << STEP_BITS, step
    assert 0 <= place < 1 << PLACE_BITS, place
    first = (step << PLACE_BITS | place) << 80
    return str(uuid.UUID(int=first | 8 << 76 | _MARK << 64 | 0b10 << 62 | secrets.randbits(62)))


def place_of(uid: str) -> tuple[int, int] | None:
    """Step and place of a uid made by :func:`ordered_uid`; None for any other.

    >>> place_of(ordered_uid(3, 17))
    (3, 17)
    """
    try:
        parsed = uuid.UUID(uid)
    except ValueError:
        return None
    if parsed.version != 8 or parsed.int >> 64 & 0xFFF != _MARK:
        return None
    first = parsed.int >> 80
    return first >> PLACE_BITS, first & ((1 << PLACE_BITS) - 1)


def data_order(keys: Sequence[str]) -> list[int]:
    """Numbers of the rows in the order of the data set: by step and place of the prompt, session, and row of a session.

    Prompts whose uid holds no place come last, in the order of their first rows in the batch; their rows are ordered
    like those of any other prompt. The order of a batch without any such prompt does not depend on the order of its
    keys.

    Args:
        keys: of the form ``{uid}_{session}_{index}``; a key of another form stands for a prompt with a single row.

    >>> early, late = ordered_uid(1, 0), ordered_uid(1, 1)
    >>> data_order([f"{late}_0_0", f"{early}_1_0", f"{early}_0_10", f"{early}_0_9"])
    [3, 2, 1, 0]
    """
    first_row: dict[str, int] = {}
    ranks: list[tuple[bool, str | int, int, int]] = []
    for row, key in enumerate(keys):
        uid, session, index = parts_of_key(key) or (key, "0", "0")
        knows = place_of(uid) is not None
        ranks.append((not knows, uid if knows else first_row.setdefault(uid, row), int(session), int(index)))
    return sorted(range(len(ranks)), key=ranks.__getitem__)
