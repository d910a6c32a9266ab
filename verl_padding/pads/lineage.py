"""Which rows extend each other, found from what their outputs may depend on.

Row b extends row a if a's tokens, prompt and response, are the first tokens of b, and position ids, images, recorded
routes and a teacher's fields are equal there too. The trainer looks for such rows in each session of several rows, for
the plan, unless the agent loop has said which they are; workers compare the rows of a chain again before they share
anything.

That a row begins with another says what may be computed once, not what happened: an agent that meets the same state
twice may answer it twice with the same tokens. :func:`find_continued` tells which rows hold the actions of others.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import KVBatchMeta, fields_of_all, read_fields
from verl_padding.plan.chains import may_extend
from verl_padding.plan.counted import counted
from verl_padding.plan.row_keys import index_of_key, session_of_key

logger = logging.getLogger(__name__)

RECORDED = ("routed_experts", "teacher_ids", "teacher_logprobs")
"""Fields that may differ between rows with the same tokens. They are large, as images are."""
PER_TOKEN = ("position_ids", *RECORDED)
"""Fields beside the tokens that outputs may depend on, one value per token: they must agree up to where rows part."""
TOKENS, IMAGES = "input_ids", "multi_modal_inputs"
EXTRA_FIELDS, EXTENDS = "extra_fields", "extends"
"""Field of verl's rows, and what an agent loop may say in it: the number, in its session, of the row that this one
extends. A session with such a row is not searched; its rows without one extend none."""
TASKS = 4
"""Ray tasks at a time: they are short, and each process that runs them imports verl first."""
TOKENS_AT_ONCE = 1 << 22
"""Tokens that are read at once, by a Ray task if there are more: 32 MiB of token ids."""


def find_extensions(
    batch: KVBatchMeta, tokens_R: Sequence[int], *, images: bool = False, outputs: bool = True
) -> list[int | None]:
    """Number of the row that each row of a batch extends; None for none.

    Only sessions of several rows are read, and nothing if no session has more than one. Large batches, and rows with
    images or recorded fields, are read and compared by Ray tasks, so that the driver gets numbers only. Tokens are not
    read of sessions whose agent loop has said which rows extend each other (:data:`EXTENDS`).

    Args:
        tokens_R: tokens of each row.
        images: whether rows may have images. Agent loops know tokens alone, so they are not believed then.
        outputs: whether the rows' outputs must be the same, too; if not, equal tokens and images are enough. Workers
            compare the former again, and nobody the latter, so agent loops are not believed about the latter.

    Raises:
        PaddingDataError: an agent loop has said something that cannot be.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(batch.keys):
        rows_of.setdefault(session_of_key(key), []).append(row)
    sessions = [rows for rows in rows_of.values() if len(rows) > 1]
    extends_R: list[int | None] = [None] * len(batch.keys)
    if not sessions:
        return extends_R
    there = fields_of_all([batch.keys[row] for row in sessions[0]], batch.partition_id)
    recorded = not there.isdisjoint(RECORDED)
    compared = PER_TOKEN if outputs else ()
    large = images or (recorded and outputs)
    said: dict[int, int | None] = {}
    # An agent loop that says it says it in each session of several rows: if the first is silent, no other one is read.
    if outputs and not large and _said_by_agent_loops(batch, tokens_R, sessions[0]):
        said = _said_by_agent_loops(batch, tokens_R, [row for rows in sessions for row in rows])
    for row, named in said.items():
        extends_R[row] = named
    searched = [rows for rows in sessions if said.keys().isdisjoint(rows)]
    tokens_S = [sum(tokens_R[row] for row in rows) for rows in searched]
    at_once = min(TOKENS_AT_ONCE, -(-sum(tokens_S) // TASKS)) if large else TOKENS_AT_ONCE
    parts: list[list[list[int]]] = []
    read = at_once
    for rows, tokens in zip(searched, tokens_S, strict=True):
        if read >= at_once:
            parts.append([])
            read = 0
        parts[-1].append(rows)
        read += tokens
    asked = [[[batch.keys[row] for row in rows] for rows in part] for part in parts]
    found = (
        _by_tasks(asked, batch.partition_id, compared, large)
        if large or len(parts) > 1
        else [_extensions_in_queue(part, batch.partition_id, compared, large) for part in asked]
    )
    for part, of_part in zip(parts, found, strict=True):
        for rows, extends in zip(part, of_part, strict=True):
            for row, earlier in zip(rows, extends, strict=True):
                extends_R[row] = None if earlier is None else rows[earlier]
    return extends_R


def find_continued(batch: KVBatchMeta, tokens_R: Sequence[int], *, images: bool = False) -> list[int | None]:
    """Number of the row that each row of a batch continues, so that a token of both is one action; None for none.

    Args:
        tokens_R: tokens of each row.
        images: whether rows may have images.

    Raises:
        PaddingDataError: an agent loop has said something that cannot be.
    """
    begins_R = find_extensions(batch, tokens_R, images=images, outputs=False)
    sessions = {session_of_key(key) for key, earlier in zip(batch.keys, begins_R, strict=True) if earlier is not None}
    rows = [row for row, key in enumerate(batch.keys) if session_of_key(key) in sessions]
    said = _said_by_agent_loops(batch, tokens_R, rows) if rows else {}
    return continued(batch.keys, tokens_R, begins_R, said)


def continued(
    keys: Sequence[str],
    tokens_R: Sequence[int],
    begins_R: Sequence[int | None],
    said: Mapping[int, int | None],
) -> list[int | None]:
    """Number of the row that each row continues: the one that its agent loop names, if it begins with that one.

    In a session of which nothing is said, a row continues the longest row before it that it begins with, and that is
    shorter: an agent has gone on from there. It cannot have gone on from an equal row, nor from one that came later.

    Args:
        begins_R: number of the row that each row begins with, as :func:`extensions` finds it.
        said: number of the row that a row extends, of those of which it was said; None for none.
    """
    telling = {session_of_key(keys[row]) for row in said}

    def continues(row: int, earlier: int) -> bool:
        if session_of_key(keys[row]) in telling:
            return said.get(row) == earlier
        return tokens_R[earlier] < tokens_R[row] and index_of_key(keys[earlier]) < index_of_key(keys[row])

    continued_R: list[int | None] = []
    for row, earlier in enumerate(begins_R):
        while earlier is not None and not continues(row, earlier):
            earlier = begins_R[earlier]
        continued_R.append(earlier)
    return continued_R


def _said_by_agent_loops(batch: KVBatchMeta, tokens_R: Sequence[int], rows: Sequence[int]) -> dict[int, int | None]:
    """Number of the row that a row extends, for those rows of which an agent loop has said it; None for none."""
    fields = read_fields([batch.keys[row] for row in rows], batch.partition_id, [EXTRA_FIELDS])
    number = {key: row for row, key in enumerate(batch.keys)}
    said: dict[int, int | None] = {}
    impossible = []
    for row, extra in zip(rows, _extra_fields(fields), strict=True):
        if EXTENDS not in extra:
            continue
        said[row] = None
        if extra[EXTENDS] is not None:
            # A row that is not in the batch has been left out of it.
            earlier = number.get(_key_in_session(batch.keys[row], extra[EXTENDS]))
            if earlier is not None and may_extend(tokens_R, row, earlier):
                said[row] = earlier
            elif earlier is not None:
                impossible.append(row)
    if impossible:
        key, named = batch.keys[impossible[0]], _extra_fields(fields)[rows.index(impossible[0])][EXTENDS]
        logger.warning(
            "verl_padding: row %r says that it extends row %d of its session, which has more tokens, or as many and "
            "comes later (%s in all). It is computed as it is. Correct extra_fields[%r] of the agent loop.",
            key,
            named,
            counted(len(impossible), "such row"),
            EXTENDS,
        )
    return said


def _extra_fields(rows: TensorDict) -> list[Mapping[str, Any]]:
    """What agent loops have said beside each row; nothing where a row holds something else there."""
    if EXTRA_FIELDS not in set(rows.keys()):
        return [{}] * len(rows)
    return [extra if isinstance(extra, Mapping) else {} for extra in tu.get(rows, EXTRA_FIELDS)]


def _key_in_session(key: str, place: Any) -> str:
    """The key of another row of a row's session."""
    if isinstance(place, bool) or not hasattr(place, "__index__") or place < 0:
        raise PaddingDataError(
            f"row {key!r}: extra_fields[{EXTENDS!r}] is {place!r}, and must be the number of a row of its session, "
            "from 0, or None. Have the agent loop say it so, or leave it out."
        )
    return f"{session_of_key(key)}_{operator.index(place)}"


def _by_tasks(
    parts: Sequence[Sequence[Sequence[str]]], partition_id: str, compared: Sequence[str], large: bool
) -> list[list[list[int | None]]]:
    """What :func:`_extensions_in_queue` says of each part, a few of them at a time."""
    task = ray.remote(num_cpus=0)(_extensions_in_queue)
    told: list[Any] = []
    for part in parts:
        if len(told) >= TASKS:
            ray.wait(told, num_returns=len(told) - TASKS + 1, fetch_local=False)
        told.append(task.remote(part, partition_id, compared, large))
    found: list[list[list[int | None]]] = ray.get(told)
    return found


def _extensions_in_queue(
    sessions: Sequence[Sequence[str]], partition_id: str, compared: Sequence[str], large: bool
) -> list[list[int | None]]:
    """For each session, the place of the row that each row extends, among the rows of the session.

    Args:
        compared: fields beside tokens and images that must be the same.
        large: whether rows have images or recorded fields, so that no more than a session's are held at once.
    """
    keys = [key for session in sessions for key in session]
    of_session = [range(*ends) for ends in pairwise(accumulate(map(len, sessions), initial=0))]
    begins = Inputs(read_fields(keys, partition_id, [TOKENS]))
    extends_R: list[int | None] = []
    for rows in of_session:
        extends_R += extensions(begins, rows)
    # What else must be equal is read only of rows whose tokens begin alike.
    alike = [
        sorted({row for later in rows if (earlier := extends_R[later]) is not None for row in (earlier, later)})
        for rows in of_session
    ]
    alike = [rows for rows in alike if rows]
    for group in [[rows] for rows in alike] if large else [alike] if alike else []:
        number_R = [row for rows in group for row in rows]
        rest = read_fields([keys[row] for row in number_R], partition_id, [TOKENS, IMAGES, *compared])
        inputs = Inputs(rest)
        for ends in pairwise(accumulate(map(len, group), initial=0)):
            read = range(*ends)
            for row, earlier in zip(read, extensions(inputs, read), strict=True):
                extends_R[number_R[row]] = None if earlier is None else number_R[earlier]
    return [
        [None if earlier is None else earlier - rows.start for earlier in extends_R[rows.start : rows.stop]]
        for rows in of_session
    ]


def extensions(inputs: Inputs, rows: Sequence[int]) -> list[int | None]:
    """Number of the row that each of some rows extends: the longest of them, and the last of several as long.

    Args:
        rows: numbers of the rows, rising.
    """
    extends: dict[int, int | None] = {}
    # In this order the rows that begin with a row come right after it.
    order = sorted(rows, key=lambda row: (inputs.bytes_R[row], row))
    before: list[int] = []
    for row in order:
        while before and not inputs.bytes_R[row].startswith(inputs.bytes_R[before[-1]]):
            before.pop()
        extends[row] = next((shorter for shorter in reversed(before) if inputs.agree(shorter, row)), None)
        before.append(row)
    return [extends[row] for row in rows]


class Inputs:
    """What the outputs of rows may depend on: tokens, position ids, images, temperature, recorded routes, a teacher.

    Args:
        data: rows with ``input_ids``, on the CPU.
    """

    def __init__(self, data: TensorDict):
        names = set(data.keys())
        tokens = data[TOKENS].unbind()
        self.bytes_R = [_bytes(row) for row in tokens]
        """The tokens of each row, eight bytes each: a row begins with another if its bytes do."""
        self._lengths = [len(row) for row in tokens]
        self._fields = [(name, data[name].unbind()) for name in PER_TOKEN if name in names]
        temperature = tu.get(data, "temperature") if "temperature" in names else None
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.tolist()
        # A number holds for all rows.
        self._temperature = temperature if isinstance(temperature, Sequence) else None
        self._images = tu.get(data, IMAGES) if IMAGES in names else None

    def extends(self, longer: int, shorter: int) -> bool:
        """Whether a row begins with all of another, whatever outputs depend on."""
        return self.bytes_R[longer].startswith(self.bytes_R[shorter]) and self.agree(shorter, longer)

    def agree(self, shorter: int, longer: int) -> bool:
        """Whether two rows agree in all but their tokens, up to the end of the shorter one."""
        length = self._lengths[shorter]
        if self._temperature is not None and self._temperature[shorter] != self._temperature[longer]:
            return False
        for name, rows in self._fields:
            # (tokens, ..), and position ids (.., tokens); a field of another length covers something else.
            dim = -1 if name == "position_ids" else 0
            a, b = rows[shorter], rows[longer]
            if a.shape[dim] != length or b.shape[dim] < length:
                return False
            # A teacher says nothing of the token after a row's last one: verl fills it in.
            compared = length - 1 if name.startswith("teacher") else length
            if not torch.equal(a.narrow(dim, 0, compared), b.narrow(dim, 0, compared)):
                return False
        return self._images is None or _images_begin_alike(self._images[shorter], self._images[longer])


def _images_begin_alike(shorter: Mapping[str, Any] | None, longer: Mapping[str, Any] | None) -> bool:
    """Whether the images of the shorter row are the first ones of the longer one."""
    shorter, longer = shorter or {}, longer or {}
    if not shorter:
        # A row without an image: all that the other one has must be of its images, and not of the row.
        return all(b is None or (isinstance(b, torch.Tensor) and b.dim() > 0) for b in longer.values())
    if shorter.keys() != longer.keys():
        return False
    for name, a in shorter.items():
        b = longer[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            alike = a is None and b is None
        elif a.dim() == 0 or b.dim() != a.dim():
            alike = torch.equal(a, b)
        else:
            alike = torch.equal(a, b[: len(a)])
        if not alike:
            return False
    return True


def _bytes(row: torch.Tensor) -> bytes:
    """The tokens of a row, eight bytes each: a row is the beginning of another if its bytes are."""
    return row.to(torch.int64).numpy().tobytes()
