"""Prompt ids that carry the order of the data set, and rows put in that order.

verl gives each prompt a random uid, and its rows come back when their sessions end: nothing in a
batch says which prompt comes first in the data set. A uid of this module begins with the step that
fetched the prompt and its place in that step, so that uids sort as the data set is read. The rest
is random: no other job has the same.
"""

import re
import secrets
from collections.abc import Sequence

from verl_padding.plan.row_keys import parts_of_key

_ORDERED = re.compile(r"step(\d{7})-(\d{7})-[0-9a-f]{16}")


def ordered_uid(step: int, place: int) -> str:
    """A uid of a prompt that was fetched in this step of the trainer, at this place, from 0.

    >>> ordered_uid(3, 17)[:20]
    'step0000003-0000017-'
    """
    return f"step{step:07}-{place:07}-{secrets.token_hex(8)}"


class PromptNames:
    """Uids of the prompts that a job fetches, in the order in which it fetches them."""

    def __init__(self) -> None:
        self._step, self._fetched = 0, 0

    def next(self, step: int, n_prompts: int) -> list[str]:
        """Uids of the next prompts, fetched in this step of the trainer: the places go on from the
        last ones."""
        first = self._fetched if step == self._step else 0
        self._step, self._fetched = step, first + n_prompts
        return [ordered_uid(step, place) for place in range(first, first + n_prompts)]


def place_of(uid: str) -> tuple[int, int] | None:
    """Step and place of a uid made by :func:`ordered_uid`; None for any other."""
    match = _ORDERED.fullmatch(uid)
    return (int(match[1]), int(match[2])) if match else None


def data_order(keys: Sequence[str]) -> list[int]:
    """Numbers of the rows in the order of the data set: by step and place of the prompt, session,
    and row of a session.

    Prompts whose uid holds no place come last, in the order of their first rows in the batch. A key
    that is not of the form ``{uid}_{session}_{index}`` stands for a prompt with a single row.

    >>> early, late = ordered_uid(1, 0), ordered_uid(1, 1)
    >>> data_order([f"{late}_0_0", f"{early}_1_0", f"{early}_0_10", f"{early}_0_9"])
    [3, 2, 1, 0]
    """
    # step0000001-0000000-.. before step0000001-0000001-..; within a prompt, session 0 before 1, and
    # index 9 before 10, as numbers.
    first_row: dict[str, int] = {}
    ranks: list[tuple[bool, str | int, int, int]] = []
    for row, key in enumerate(keys):
        uid, session, index = parts_of_key(key) or (key, "0", "0")
        knows = place_of(uid) is not None
        ranks.append(
            (not knows, uid if knows else first_row.setdefault(uid, row), int(session), int(index))
        )
    return sorted(range(len(ranks)), key=ranks.__getitem__)
