"""Which rows extend each other, found from what their outputs may depend on.

Row b extends row a if a's tokens, prompt and response, are the first tokens of b, and position ids, images, recorded
routes and a teacher's fields are equal there too. The trainer looks for such rows in sessions of several rows, for the
plan; workers look again in each micro-batch before they share anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.pads.queue import KVBatchMeta, read_fields_of_some
from verl_padding.plan.row_keys import session_of_key

PER_TOKEN = ("position_ids", "routed_experts", "teacher_ids", "teacher_logprobs")
"""Fields beside the tokens that outputs may depend on, one value per token: they must agree up to where rows part."""
TOKENS, IMAGES = "input_ids", "multi_modal_inputs"
TOKENS_AT_ONCE = 1 << 22
"""Tokens that are read at once, by a Ray task if there are more: 32 MiB of token ids."""


def find_extensions(batch: KVBatchMeta, tokens_R: Sequence[int]) -> list[int | None]:
    """Number of the row that each row of a batch extends; None for none.

    Only sessions of several rows are read, and nothing if no session has more than one. Large batches are read and
    compared by Ray tasks, so that the driver gets numbers only.

    Args:
        tokens_R: tokens of each row.
    """
    session_R = [session_of_key(key) for key in batch.keys]
    rows_of = Counter(session_R)
    numbers = sorted(
        (row for row, session in enumerate(session_R) if rows_of[session] > 1), key=lambda row: session_R[row]
    )
    parts: list[list[int]] = []
    read, last = TOKENS_AT_ONCE, None
    for row in numbers:
        if session_R[row] != last and read >= TOKENS_AT_ONCE:
            parts.append([])
            read = 0
        parts[-1].append(row)
        read, last = read + tokens_R[row], session_R[row]
    keys = [[batch.keys[row] for row in part] for part in parts]
    if len(parts) > 1:
        task = ray.remote(num_cpus=0)(_extensions_in_queue)
        found = ray.get([task.remote(part, batch.partition_id) for part in keys])
    else:
        found = [_extensions_in_queue(part, batch.partition_id) for part in keys]
    extends_R: list[int | None] = [None] * len(batch.keys)
    for part, extends in zip(parts, found, strict=True):
        for row, earlier in zip(part, extends, strict=True):
            extends_R[row] = None if earlier is None else part[earlier]
    return extends_R


def _extensions_in_queue(keys: Sequence[str], partition_id: str) -> list[int | None]:
    return extensions(read_fields_of_some(keys, partition_id, [TOKENS, IMAGES, *PER_TOKEN]))


def extensions(data: TensorDict, rows: Sequence[int] | None = None) -> list[int | None]:
    """Number of the row that each row of some data extends: the longest one, of rows as long the last one.

    Args:
        data: rows with ``input_ids``, on the CPU.
        rows: numbers of the rows that may; None for all.
    """
    tokens_R = [_bytes(row) for row in data[TOKENS].unbind()]
    # In this order a row comes right before one that extends it, if there is any.
    order = sorted(range(len(tokens_R)) if rows is None else rows, key=lambda row: (tokens_R[row], row))
    inputs: _Inputs | None = None
    extends: list[int | None] = [None] * len(tokens_R)
    for shorter, longer in pairwise(order):
        if tokens_R[longer].startswith(tokens_R[shorter]):
            inputs = inputs or _Inputs(data)
            if inputs.agree(shorter, longer):
                extends[longer] = shorter
    return extends


class _Inputs:
    """What the outputs of rows may depend on beside their tokens."""

    def __init__(self, data: TensorDict):
        names = set(data.keys())
        self._lengths = [len(row) for row in data[TOKENS].unbind()]
        self._fields = [(name, data[name].unbind()) for name in PER_TOKEN if name in names]
        temperature = data["temperature"] if "temperature" in names else None
        self._temperature = temperature if isinstance(temperature, torch.Tensor) and temperature.dim() else None
        self._images = tu.get(data, IMAGES) if IMAGES in names else None

    def agree(self, shorter: int, longer: int) -> bool:
        """Whether two rows agree in all of it, up to the end of the shorter one."""
        length = self._lengths[shorter]
        if self._temperature is not None and self._temperature[shorter] != self._temperature[longer]:
            return False
        for name, rows in self._fields:
            # (tokens, ..), and position ids (.., tokens); a field of another length covers something else.
            dim = -1 if name == "position_ids" else 0
            a, b = rows[shorter], rows[longer]
            if a.shape[dim] != length or b.shape[dim] < length or not torch.equal(a, b.narrow(dim, 0, length)):
                return False
        return self._images is None or _images_begin_alike(self._images[shorter], self._images[longer])


def _images_begin_alike(shorter: Mapping[str, Any] | None, longer: Mapping[str, Any] | None) -> bool:
    """Whether the images of the shorter row are the first ones of the longer one."""
    shorter, longer = shorter or {}, longer or {}
    if shorter and shorter.keys() != longer.keys():
        return False
    for name, a in shorter.items():
        b = longer[name]
        if not isinstance(a, torch.Tensor) or a.shape[1:] != b.shape[1:] or not torch.equal(a, b[: len(a)]):
            return False
    return True


def _bytes(row: torch.Tensor) -> bytes:
    """The tokens of a row, eight bytes each: a row is the beginning of another if its bytes are."""
    return row.to(torch.int64).numpy().tobytes()
