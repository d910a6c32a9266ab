"""How far the rows of a batch begin alike, found once a step: for its plan, its advantages and its
record.

Example:
    Rows ``p_0_0`` [5, 6, 7], ``p_0_1`` [5, 6, 7, 8, 9] and ``p_1_0`` [5, 6, 4]. In the tries by
    tokens ``p_0_1`` comes first, ``p_0_0`` shares 3 tokens with it, and ``p_1_0``, the last, 2 with
    ``p_0_0``. Where a router has sent the token 6 of ``p_1_0`` elsewhere, outputs are the same for
    its first token alone: 1 in the tries by outputs. And ``p_0_0`` is the parent of ``p_0_1``: the
    agent has gone on from there, so what both train is one action.

That a row begins with another says what may be computed once, not what happened: an agent that
meets the same state twice may answer it twice with the same tokens. An agent loop can say what
happened (:data:`EXTENDS`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from numbers import Integral
from typing import Any

import numpy as np
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import (
    KVBatchMeta,
    fields_of_all,
    first_few,
    read_extra_fields,
    read_fields,
)
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.upsampling import MULTI_MODAL_INPUTS, images_of_rows
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import (
    index_of_key,
    rows_by_name,
    rows_of_sessions,
    session_of_key,
    uid_of_key,
)
from verl_padding.prefix_sharing.row_inputs import (
    INPUT_IDS,
    RECORDED,
    ROUTES,
    RowInputs,
    images_begin_alike,
)

logger = logging.getLogger(__name__)

EXTENDS = "extends"
"""What an agent loop may put into a row's ``extra_fields``: the position in its session of the row
that this one extends, its parent, or None. Rows of such a session have no other parents."""
MAX_TOKENS_READ, MAX_LARGE_TOKENS_READ = 1 << 22, 1 << 16
"""Tokens of the rows that are read at once: ids alone, and with the fields of which a token may
have kilobytes."""


class PrefixDetection:
    """How far the rows of a batch begin alike; each answer is found when it is first asked for, and
    kept.

    The record uses :attr:`by_tokens`, plan and workers :attr:`by_outputs`, the mask of repeated
    tokens :attr:`by_samples`, and advantages of sessions :attr:`parent_R`.

    Args:
        batch: real rows in TransferQueue.
        may_have_images: whether the job's models look at images or sounds.
    """

    def __init__(self, batch: KVBatchMeta, *, may_have_images: bool = False):
        self._keys, self._partition = list(batch.keys), batch.partition_id
        self._tokens_R = tokens_of_tags(batch.tags)
        self._may_have_images, self._batch = may_have_images, batch

    @cached_property
    def has_images(self) -> bool:
        """Whether a row has an image or a sound."""
        return self._may_have_images and any(images_of_rows(self._batch))

    @cached_property
    def by_tokens(self) -> PrefixTries:
        """How far rows of a prompt, or of a session where there are images, begin with the same
        tokens."""
        # Sessions meet images of their own: rows of two sessions that look at different ones may
        # have the same tokens.
        group_R = list(map(session_of_key if self.has_images else uid_of_key, self._keys))
        order: list[int] = []
        shared_R = np.zeros(len(group_R), dtype=np.int64)
        for part in self._parts(rows_by_name(group_R).values(), MAX_TOKENS_READ):
            ids_R = RowInputs(self._read(part, [INPUT_IDS])).ids_R
            tries = PrefixTries.from_tokens(ids_R, [group_R[row] for row in part])
            order += [part[place] for place in np.argsort(tries.dfs_position_R)]
            shared_R[part] = tries.shared_R
        return PrefixTries.in_order(self._tokens_R, order, shared_R[order])

    @cached_property
    def by_outputs(self) -> PrefixTries:
        """How far rows have the same outputs: the same tokens, images, recorded routes and
        teacher's fields.

        Position ids follow from the tokens where nothing else is there; workers compare them in any
        case.
        """
        return self._compared(RECORDED)

    @cached_property
    def by_samples(self) -> PrefixTries:
        """How far tokens of rows are the same samples: as :attr:`by_outputs`, whatever a teacher
        says of them."""
        return self._compared(ROUTES)

    def _compared(self, recorded: tuple[str, ...]) -> PrefixTries:
        tries, there = self.by_tokens, fields_of_all(self._keys, self._partition)
        if not self.has_images and there.isdisjoint(recorded):
            return tries
        names = [INPUT_IDS, MULTI_MODAL_INPUTS, "position_ids", *recorded]
        order, shared_R = np.argsort(tries.dfs_position_R).tolist(), tries.shared_R.copy()
        before_of = {row: before for before, row in pairwise(order) if shared_R[row]}
        for part in self._parts([[row] for row in before_of], MAX_LARGE_TOKENS_READ):
            read = list(dict.fromkeys(each for row in part for each in (before_of[row], row)))
            inputs = RowInputs(self._read(read, names))
            number = {row: place for place, row in enumerate(read)}
            for row in part:
                shared_R[row] = min(
                    shared_R[row], inputs.shared(number[before_of[row]], number[row])
                )
        return PrefixTries.in_order(self._tokens_R, order, shared_R[order])

    @cached_property
    def parent_R(self) -> list[int | None]:
        """Number of the row that each row extends, so that a token of both is one action; None for
        none.

        That is the longest row before it in its session that it begins with, and that is shorter:
        an agent cannot have extended an equal row, nor a later one. In a session whose agent loop
        says what rows extend (:data:`EXTENDS`), it is the row that it names, if it begins with that
        one.
        """
        parent_R: list[int | None] = [None] * len(self._keys)
        sessions, declared = self._sessions_of_rows, self._declared
        at_once = MAX_LARGE_TOKENS_READ if self.has_images else MAX_TOKENS_READ
        for part in self._parts(sessions, at_once):
            images_of = {}
            if self.has_images:
                images = tu.get(self._read(part, [MULTI_MODAL_INPUTS]), MULTI_MODAL_INPUTS)
                images_of = dict(zip(part, images, strict=True))
            found = parent_rows(self.by_tokens, self._keys, part, declared, images_of)
            for row, parent in found.items():
                parent_R[row] = parent
        mistaken = [self._keys[row] for row, named in declared.items() if parent_R[row] != named]
        if mistaken:
            logger.warning(
                f"verl_padding: extra_fields[{EXTENDS!r}] of rows {first_few(mistaken)} "
                f"({len(mistaken)} in all) names no earlier row of the session that they begin "
                "with. They extend no row. Correct it in the agent loop."
            )
        return parent_R

    @cached_property
    def declaring(self) -> set[str]:
        """Names of the sessions whose agent loop says what a row extends."""
        return {session_of_key(self._keys[row]) for row in self._declared}

    @cached_property
    def _sessions_of_rows(self) -> list[list[int]]:
        """Numbers of the rows of each session of several rows."""
        return [rows for rows in rows_of_sessions(self._keys) if len(rows) > 1]

    @cached_property
    def _declared(self) -> dict[int, int | None]:
        """Number of the row that a row extends, None for none, for those rows whose agent loop says
        it."""
        rows = [row for session in self._sessions_of_rows for row in session]
        number = {key: row for row, key in enumerate(self._keys)}
        declared: dict[int, int | None] = {}
        extra_R = read_extra_fields([self._keys[row] for row in rows], self._partition)
        for row, extra in zip(rows, extra_R, strict=True):
            if EXTENDS not in extra:
                continue
            key, place = self._keys[row], extra[EXTENDS]
            if place is not None and (
                isinstance(place, bool) or not isinstance(place, Integral) or place < 0
            ):
                raise PaddingDataError(
                    f"row {key!r}: extra_fields[{EXTENDS!r}] is {place!r}, but must be the "
                    "position of a row in its session, from 0, or None. Correct it in the agent "
                    "loop, or leave it out."
                )
            # A row that is not in the batch has been left out of it.
            declared[row] = None if place is None else number.get(f"{session_of_key(key)}_{place}")
        return declared

    def _read(self, rows: Sequence[int], names: Sequence[str]) -> TensorDict:
        return read_fields([self._keys[row] for row in rows], self._partition, names)

    def _parts(self, groups: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
        """The rows of groups, in parts of about ``max_tokens`` that are read at once; no group is
        cut."""
        # Groups of 3, 4 and 5 tokens begin at 0, 3 and 7: with 6 at once, the first two begin
        # before 6 and are one part, and the third is the next.
        groups = list(groups)
        begins = accumulate(
            (sum(self._tokens_R[row] for row in rows) for rows in groups), initial=0
        )
        for _, part in groupby(
            zip(begins, groups, strict=False), key=lambda each: each[0] // max_tokens
        ):
            yield [row for _, rows in part for row in rows]


def parent_rows(
    tries: PrefixTries,
    keys: Sequence[str],
    rows: Sequence[int],
    declared: Mapping[int, int | None],
    images_of: Mapping[int, Mapping[str, Any] | None],
) -> dict[int, int]:
    """Of the rows with these numbers, which are those of whole sessions: the row that each
    extends.

    Args:
        tries: by tokens.
        declared: what agent loops say of rows; other rows of their sessions extend none.
        images_of: of each row; empty where no row has any.
    """
    declaring = {session_of_key(keys[row]) for row in declared}

    def extends(row: int, parent: int) -> bool:
        if images_of and not images_begin_alike(images_of[parent] or {}, images_of[row] or {}):
            return False
        if index_of_key(keys[parent]) > index_of_key(keys[row]):
            return False
        if session_of_key(keys[row]) in declaring:
            return declared.get(row) == parent
        return bool(tries.tokens_R[parent] < tries.tokens_R[row])

    found = {}
    for session in rows_of_sessions([keys[row] for row in rows]):
        numbers = np.array([rows[place] for place in session])
        order, shared_I = tries.shared_among(numbers)
        numbers = numbers[order]
        # Of equal rows, the last of the session comes first.
        tokens_I = tries.tokens_R[numbers]
        differs_I = (shared_I[1:] < tokens_I[1:]) | (tokens_I[1:] < tokens_I[:-1])
        numbers = numbers[np.lexsort((-order, np.append(0, differs_I.cumsum())))]
        for place, row in enumerate(numbers.tolist(), 1):
            # What a row begins with comes after it, the longest first.
            minima, after = np.minimum.accumulate(shared_I[place:]), numbers[place:]
            for parent in after[minima == tries.tokens_R[after]].tolist():
                if extends(row, parent):
                    found[row] = parent
                    break
    return found
