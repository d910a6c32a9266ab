"""Which rows extend each other, found from what their outputs may depend on.

Row b extends row a if a's tokens, prompt and response, are the first tokens of b, and position ids, images, recorded
routes and a teacher's fields are equal there too. The trainer looks for such rows in sessions of several rows, for the
plan, unless the agent loop has declared them; workers compare the rows of a chain again before they share anything.

That a row begins with another says what may be computed once, not what happened: an agent that meets the same state
twice may answer it twice with the same tokens. :func:`find_continued` finds which rows hold the actions of others.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import KVBatchMeta, fields_of_all, first_few, read_fields
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import index_of_key, rows_of_sessions, session_of_key, uid_of_key
from verl_padding.plan.rows import may_extend

logger = logging.getLogger(__name__)

TOKENS, IMAGES = "input_ids", "multi_modal_inputs"
RECORDED = ("routed_experts", "teacher_ids", "teacher_logprobs")
"""Fields that may differ between rows with the same tokens. They are large, as images are."""
PER_TOKEN = ("position_ids", *RECORDED)
"""Fields beside the tokens that outputs may depend on, one value per token: they must agree up to where rows part."""
EXTRA_FIELDS, EXTENDS = "extra_fields", "extends"
"""Field of verl's rows, and what an agent loop may put into it: the number, in its session, of the row that this one
extends. A session with such a row is not searched; its rows without one extend none."""
TOKENS_AT_ONCE, LARGE_AT_ONCE = 1 << 22, 1 << 16
"""Tokens of the rows that are read at once: ids alone, and with the fields of which a token may have kilobytes."""


class Inputs:
    """What the outputs of rows, on the CPU, may depend on: tokens, images, temperature, and :data:`PER_TOKEN`."""

    def __init__(self, data: TensorDict):
        self.ids_R = [row.to(torch.int64) for row in data[TOKENS].unbind()]
        """The tokens of each row."""
        self.bytes_R = [ids.numpy().astype(">i8").tobytes() for ids in self.ids_R]
        """The same, eight bytes each, big endian: they sort as numbers do, and a row begins with another if they do."""
        # (tokens, ..); position ids are (.., tokens)
        self._fields_RT = {
            name: [row.movedim(-1, 0) if name == "position_ids" else row for row in data[name].unbind()]
            for name in PER_TOKEN
            if name in data
        }
        temperature = tu.get(data, "temperature")
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.tolist()
        self.temperature_R: Sequence[float] | None = temperature if isinstance(temperature, Sequence) else None
        """Of each row; None where one holds for all."""
        images = tu.get(data, IMAGES)
        self._images: list[Mapping[str, Any]] = [each or {} for each in images or [{}] * len(self.ids_R)]

    def trees(self, group_R: Sequence[str] | None = None) -> tuple[list[int], list[int]]:
        """The rows in the order of their trees, and how many tokens each shares with the one before it.

        In that order a row shares most with the one before it, and a row comes before its own beginnings.

        Args:
            group_R: rows of different groups share nothing.
        """
        groups = group_R or [""] * len(self.ids_R)
        order = sorted(range(len(groups)), key=lambda row: (groups[row], self.bytes_R[row], row), reverse=True)
        shared_I = [self.shared(a, b) if groups[a] == groups[b] else 0 for a, b in pairwise(order)]
        return order, [0, *shared_I]

    @property
    def has_images(self) -> bool:
        """Whether a row has any."""
        return any(self._images)

    def alike(self, one: int, other: int) -> int:
        """How many of their first tokens are equal, whatever else outputs depend on."""
        return _alike(self.ids_R[one], self.ids_R[other])

    def extends(self, longer: int, shorter: int) -> bool:
        """Whether a row begins with all of another, whatever outputs depend on."""
        return self.shared(longer, shorter) == len(self.ids_R[shorter])

    def shared(self, longer: int, shorter: int) -> int:
        """How many of their first tokens two rows may have the same outputs for: 0, or all of one, with images."""
        if self.temperature_R is not None and self.temperature_R[shorter] != self.temperature_R[longer]:
            return 0
        n_shorter, n_longer = len(self.ids_R[shorter]), len(self.ids_R[longer])
        length = self.alike(shorter, longer)
        for name, rows in self._fields_RT.items():
            if len(rows[shorter]) != n_shorter or len(rows[longer]) != n_longer:
                return 0  # it covers something else
            # A teacher says nothing of the token after a row's last one: verl fills it in.
            compared = min(length, n_shorter - 1, n_longer - 1) if name.startswith("teacher") else length
            alike = _alike(rows[shorter][:compared], rows[longer][:compared])
            length = alike if alike < compared else length
        is_whole = length == n_shorter
        images = self._images[shorter], self._images[longer]
        if any(images) and not (is_whole and _images_begin_alike(*images)):
            return 0
        return length


def _alike(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many of the first lines of two tensors are equal."""
    length = min(len(one), len(other))
    if not length or one.shape[1:] != other.shape[1:]:
        return 0
    differ = (one[:length] != other[:length]).reshape(length, -1).any(dim=1).nonzero()
    return int(differ[0]) if len(differ) else length


def _images_begin_alike(shorter: Mapping[str, Any] | None, longer: Mapping[str, Any] | None) -> bool:
    """Whether the images of the shorter row are the first ones of the longer one."""
    shorter, longer = shorter or {}, longer or {}
    if not shorter:
        # A row without an image: all that the other one has must be of its images, and not of the row.
        return all(b is None or (isinstance(b, torch.Tensor) and b.dim() > 0) for b in longer.values())
    return shorter.keys() == longer.keys() and all(_begins_with(longer[name], shorter[name]) for name in shorter)


def _begins_with(longer: Any, shorter: Any) -> bool:
    if not isinstance(shorter, torch.Tensor) or not isinstance(longer, torch.Tensor):
        return shorter is None and longer is None
    return torch.equal(shorter, longer[: len(shorter)] if shorter.dim() and longer.dim() else longer)


def find_extensions(
    batch: KVBatchMeta, tokens_R: Sequence[int], *, images: bool = False, outputs: bool = True
) -> list[int | None]:
    """Number of the row that each row of a batch extends; None for none.

    Only sessions of several rows are read, and all but the tokens only of rows whose tokens begin alike. Nothing is
    read of sessions whose agent loop has declared which rows extend each other (:data:`EXTENDS`); a PaddingDataError
    refuses what cannot be.

    Args:
        images: whether rows may have images. Agent loops know tokens alone, so they are not believed then.
        outputs: whether the rows' outputs must be the same, too; if not, equal tokens and images are enough. Workers
            compare the former again, and nobody the latter, so agent loops are not believed about the latter.
    """
    sessions = [sorted(rows) for rows in rows_of_sessions(batch.keys) if len(rows) > 1]
    extends_R: list[int | None] = [None] * len(batch.keys)
    if not sessions:
        return extends_R
    there = fields_of_all([batch.keys[row] for row in sessions[0]], batch.partition_id)
    tokens_alone = not images and there.isdisjoint(RECORDED)
    if outputs and tokens_alone:
        declared = _declared(batch, tokens_R, [row for rows in sessions for row in rows])
        for row, earlier in declared.items():
            extends_R[row] = earlier
        sessions = [rows for rows in sessions if declared.keys().isdisjoint(rows)]

    def compare(sessions: Sequence[Sequence[int]], names: Sequence[str], at_once: int) -> None:
        for rows in _parts(sessions, tokens_R, at_once):
            keys = [batch.keys[row] for row in rows]
            found_R = extensions(Inputs(read_fields(keys, batch.partition_id, names)), keys)
            for row, earlier in zip(rows, found_R, strict=True):
                extends_R[row] = None if earlier is None else rows[earlier]

    compare(sessions, [TOKENS], TOKENS_AT_ONCE)
    extended = set(extends_R)
    alike = [[row for row in rows if extends_R[row] is not None or row in extended] for rows in sessions]
    names = [TOKENS, IMAGES, *(PER_TOKEN if outputs else ())]
    compare([rows for rows in alike if rows], names, TOKENS_AT_ONCE if tokens_alone else LARGE_AT_ONCE)
    return extends_R


def find_forest(batch: KVBatchMeta, tokens_R: Sequence[int], *, outputs: bool = True) -> Forest:
    """What the rows of each prompt begin with alike, in one session or in several, images left aside.

    Args:
        outputs: whether the rows' outputs must be the same, too; if not, equal tokens are enough.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(batch.keys):
        rows_of.setdefault(uid_of_key(key), []).append(row)
    order: list[int] = []
    shared_I: list[int] = []
    for part in _parts(list(rows_of.values()), tokens_R, TOKENS_AT_ONCE):
        keys = [batch.keys[row] for row in part]
        places, shared = Inputs(read_fields(keys, batch.partition_id, [TOKENS])).trees(list(map(uid_of_key, keys)))
        order += [part[place] for place in places]
        shared_I += shared
    # Position ids follow from the tokens where nothing else is there; workers compare them in any case.
    if outputs and not fields_of_all(batch.keys, batch.partition_id).isdisjoint(RECORDED):
        for part in _parts([[place] for place in range(len(order))], [tokens_R[row] for row in order], LARGE_AT_ONCE):
            beside = [max(part[0] - 1, 0), *part]  # each row and the one before it, a few at a time
            keys = [batch.keys[order[place]] for place in beside]
            inputs = Inputs(read_fields(keys, batch.partition_id, [TOKENS, *PER_TOKEN]))
            for number, place in enumerate(part):
                shared_I[place] = min(shared_I[place], inputs.shared(number, number + 1))
    return Forest.in_order(tokens_R, order, shared_I)


def find_continued(batch: KVBatchMeta, tokens_R: Sequence[int], *, images: bool = False) -> list[int | None]:
    """Number of the row that each row of a batch continues, so that a token of both is one action; None for none."""
    begins_R = find_extensions(batch, tokens_R, images=images, outputs=False)
    sessions = {session_of_key(key) for key, earlier in zip(batch.keys, begins_R, strict=True) if earlier is not None}
    rows = [row for row, key in enumerate(batch.keys) if session_of_key(key) in sessions]
    return continued(batch.keys, tokens_R, begins_R, _declared(batch, tokens_R, rows) if rows else {})


def continued(
    keys: Sequence[str], tokens_R: Sequence[int], begins_R: Sequence[int | None], declared: Mapping[int, int | None]
) -> list[int | None]:
    """Number of the row that each row continues: the one that its agent loop names, if it begins with that one.

    In a session of which nothing is ``declared``, a row continues the longest row before it that it begins with, and
    that is shorter: an agent has gone on from there. It cannot have gone on from an equal row, nor from a later one.
    ``begins_R`` is what :func:`extensions` finds.
    """
    declaring = {session_of_key(keys[row]) for row in declared}

    def continues(row: int, earlier: int) -> bool:
        if session_of_key(keys[row]) in declaring:
            return declared.get(row) == earlier
        return tokens_R[earlier] < tokens_R[row] and index_of_key(keys[earlier]) < index_of_key(keys[row])

    continued_R = list(begins_R)
    for row, earlier in enumerate(begins_R):
        while earlier is not None and not continues(row, earlier):
            earlier = begins_R[earlier]
        continued_R[row] = earlier
    return continued_R


def _declared(batch: KVBatchMeta, tokens_R: Sequence[int], rows: Sequence[int]) -> dict[int, int | None]:
    """Number of the row that a row extends, None for none, for those rows whose agent loop has declared it."""
    fields = read_fields([batch.keys[row] for row in rows], batch.partition_id, [EXTRA_FIELDS])
    number = {key: row for row, key in enumerate(batch.keys)}
    declared: dict[int, int | None] = {}
    impossible = []
    for row, extra in zip(rows, tu.get(fields, EXTRA_FIELDS, [{}] * len(rows)), strict=True):
        if not isinstance(extra, Mapping) or EXTENDS not in extra:
            continue
        key, place = batch.keys[row], extra[EXTENDS]
        if place is not None and (isinstance(place, bool) or not isinstance(place, Integral) or place < 0):
            raise PaddingDataError(
                f"row {key!r}: extra_fields[{EXTENDS!r}] is {place!r}, and must be the number of a row of its session, "
                "from 0, or None. Have the agent loop give such a number, or leave it out."
            )
        # A row that is not in the batch has been left out of it.
        earlier = None if place is None else number.get(f"{session_of_key(key)}_{place}")
        if earlier is not None and not may_extend(tokens_R, row, earlier):
            impossible.append(key)
            earlier = None
        declared[row] = earlier
    if impossible:
        logger.warning(
            f"verl_padding: extra_fields[{EXTENDS!r}] of rows {first_few(impossible)} ({len(impossible)} in all) names "
            "a row of the session that has more tokens, or as many and comes later. They are computed as they are. "
            "Correct it in the agent loop."
        )
    return declared


def _parts(sessions: Sequence[Sequence[int]], tokens_R: Sequence[int], at_once: int) -> Iterator[list[int]]:
    """The rows of sessions, as many sessions at once as begin within so many tokens."""
    begins = accumulate((sum(tokens_R[row] for row in rows) for rows in sessions), initial=0)
    for _, part in groupby(zip(begins, sessions, strict=False), key=lambda each: each[0] // at_once):
        yield [row for _, rows in part for row in rows]


def extensions(inputs: Inputs, keys: Sequence[str]) -> list[int | None]:
    """Number of the row of its session that each row extends: the longest, and the last of several as long."""
    session_R = list(map(session_of_key, keys))
    extends_R: list[int | None] = [None] * len(keys)
    before: list[int] = []
    # In this order the rows that begin with a row come right after it.
    for row in sorted(range(len(keys)), key=lambda row: (session_R[row], inputs.bytes_R[row], row)):
        while before and not (
            session_R[before[-1]] == session_R[row] and inputs.bytes_R[row].startswith(inputs.bytes_R[before[-1]])
        ):
            before.pop()
        extends_R[row] = next((shorter for shorter in reversed(before) if inputs.extends(row, shorter)), None)
        before.append(row)
    return extends_R
