"""The verbs: pads come into a batch, pads go out of it, and real rows are told from pads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
from tensordict import TensorDict

from verl_padding.errors import PaddingDataError
from verl_padding.pads.field_kinds import FieldFormat
from verl_padding.pads.planned_call import IS_PADDING
from verl_padding.pads.queue import (
    KVBatchMeta,
    clear,
    put_columns,
    put_new_rows,
    read_rows,
    rows_like,
    select_rows,
)
from verl_padding.pads.source_rows import SourceRows
from verl_padding.pads.tags import PAD_UID_PREFIX, PADDING_TAG, check_no_pads, is_padding
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.tensordict_rows import append, restore, row_dicts, select
from verl_padding.pads.vision_families import Inputs, SmallestImage
from verl_padding.plan.row_keys import row_key

ROWS_AT_ONCE = 32
"""Rows whose images are read together: images are large, and most often the first will do."""
MULTI_MODAL_INPUTS = "multi_modal_inputs"
Batch = TypeVar("Batch", KVBatchMeta, TensorDict)


def upsample(
    batch: Batch,
    multiple: int,
    *,
    eos_token_id: int = 0,
    length: int | None = None,
    fields: Mapping[str, FieldFormat] | None = None,
    image: Callable[[Inputs], SmallestImage] | None = None,
) -> Batch:
    """Appends pads to a batch until ``multiple`` divides its number of rows.

    The batch is a ``KVBatchMeta`` of rows in TransferQueue, or a ``TensorDict`` of the rows. A pad
    has all of their fields, with the same dtypes and ranks and neutral values. The column
    ``is_padding`` marks it, and a tag of that name in TransferQueue. :func:`strip` takes it out.

    Example:
        >>> padded = upsample(batch, multiple=8)
        >>> len(batch.keys), len(padded.keys), padded.tags[-1]["is_padding"]
        (5, 8, True)

    Args:
        multiple: of rows, such as the lcm of data-parallel size and mini-batches.
        eos_token_id: the token that fills a pad.
        length: tokens of a pad; None for the fewest, 2 without an image.
        fields: formats of fields whose kind does not follow from the rows (``padding.fields``).
        image: :func:`~verl_padding.pads.vision_families.image_maker` of a model; None for no image.

    Returns: the batch's rows, then the pads, in jagged tensors where their lengths differ.

    Raises:
        PaddingDataError: no pad can be made: the batch has no row, already a pad, a row without
            prompt or response, or a field of unclear kind. Batch and queue are unchanged.
        TypeError: the batch is anything else.
    """
    _check_numbers(multiple=(multiple, 1), eos_token_id=(eos_token_id, 0), length=(length or 0, 0))
    is_queued = isinstance(batch, KVBatchMeta)
    check_no_pads(batch.keys if is_queued else range(len(batch)), _which_are_pads(batch))
    if not len(batch):
        raise PaddingDataError("a batch without a row: pads are made from real rows. Leave it out.")
    rows = SourceRows(batch).read() if is_queued else row_dicts(batch)
    inputs_R = (row.get(MULTI_MODAL_INPUTS) for row in rows)
    shown = image_of_pads(images_of_rows(batch) if is_queued else inputs_R, image)
    schema = Schema(fields)
    template = PadTemplate(eos_token_id=eos_token_id, length=length, schema=schema, image=shown)
    n_pads = -len(batch) % multiple
    # Rows are refused whether this batch needs pads or not.
    columns = template.fields(rows, n_pads=n_pads or 1)
    if isinstance(batch, TensorDict):
        return append(batch, columns, n_pads)
    marked: KVBatchMeta = rows_like(batch, batch.keys, batch.tags)
    put_columns(marked, {IS_PADDING: torch.zeros(len(batch), dtype=torch.bool)})
    if not n_pads:
        return marked
    pads: KVBatchMeta = new_pads(batch, n_pads, template)
    columns[IS_PADDING] = torch.ones(n_pads, dtype=torch.bool)
    put_new_rows(pads, TensorDict(columns, batch_size=n_pads))
    return rows_like(marked, [*batch.keys, *pads.keys], [*batch.tags, *pads.tags])


def _check_numbers(**given: tuple[Any, int]) -> None:
    """Refuses what is not a whole number, or less than the number beside it."""
    for name, (value, least) in given.items():
        # bool is an int to Python, not to a user.
        if not isinstance(value, Integral) or value is True or value < least:
            raise PaddingDataError(f"{name}={value!r}: give a whole number of at least {least}.")


def strip(batch: Batch) -> Batch:
    """Takes the pads out of a batch, and out of TransferQueue if they are there; returns its real
    rows, in their order.

    This undoes :func:`upsample`, but rows in TransferQueue keep the column ``is_padding``, and a
    batch that has ``fields`` keeps its name there. It may be called again.

    Example:
        >>> strip(upsample(batch, multiple=8)).keys == batch.keys
        True
    """
    rows: Batch = real_rows(batch)
    if isinstance(batch, TensorDict):
        return restore(rows)
    clear(sorted({*batch.keys} - {*rows.keys}), batch.partition_id)
    return rows


def real_rows(batch: Any) -> Any:
    """The batch without its pads, in the same order; rows not marked as pads are real.

    Example:
        >>> len(real_rows(upsample(batch, multiple=8)))
        5

    Args:
        batch: a ``KVBatchMeta``, whose tags say which rows are pads; or a ``TensorDict`` of worker
            data, whose column ``is_padding`` (R,) says it.

    Returns: the same type, with the real rows only.

    Raises:
        PaddingDataError: worker data holds only pads.
        TypeError: the batch is anything else.
    """
    places = [row for row, is_pad in enumerate(_which_are_pads(batch)) if not is_pad]
    if isinstance(batch, KVBatchMeta):
        return select_rows(batch, places)
    if len(batch) and not places:
        raise PaddingDataError(f"{len(batch)} rows, all of them pads: check {IS_PADDING} first.")
    return select(batch, places)


def _which_are_pads(batch: Any) -> list[bool]:
    """Of each row: by its tag, or by a column; none where there is no column."""
    if isinstance(batch, KVBatchMeta):
        return [is_padding(tag) for tag in batch.tags]
    if not isinstance(batch, TensorDict):
        raise TypeError(
            f"{type(batch)}: not a KVBatchMeta or a TensorDict (of a lazy stack, by "
            "densify(layout=torch.jagged))"
        )
    column = batch[IS_PADDING] if IS_PADDING in batch else [False] * len(batch)
    marks = list(map(np.asarray, column))
    if any(mark.size != 1 or mark.item() not in (0, 1) for mark in marks):  # as NaN is not
        why = "it must have one truth value per row. Correct it, or rename the field"
        raise PaddingDataError(f"field {IS_PADDING!r}: {why}.")
    return [bool(mark) for mark in marks]


def new_pads(batch: KVBatchMeta, n_pads: int, template: PadTemplate) -> KVBatchMeta:
    """Keys and tags of pads that belong to no prompt of the batch; nothing is put yet."""
    uid = f"{PAD_UID_PREFIX}{uuid4().hex}"
    tag = {**batch.tags[0], **template.tag_lengths, PADDING_TAG: True}
    keys = [row_key(uid, session, 0) for session in range(n_pads)]
    return KVBatchMeta(keys=keys, tags=[tag] * n_pads, partition_id=batch.partition_id)


def image_of_pads(
    inputs_R: Iterable[Inputs | None], make: Callable[[Inputs], SmallestImage] | None
) -> SmallestImage | None:
    """What is made from ``multi_modal_inputs`` of a row that has an image or a video; None if no
    row has one."""
    if make is None:
        return None
    for inputs in inputs_R:
        if inputs and any(name.startswith("pixel_values") for name in inputs):
            return make(inputs)
    return None


def images_of_rows(batch: KVBatchMeta) -> Iterator[Inputs | None]:
    """``multi_modal_inputs`` of each row in TransferQueue, read as far as they are asked for."""
    for start in range(0, len(batch), ROWS_AT_ONCE):
        keys = batch.keys[start : start + ROWS_AT_ONCE]
        for row in read_rows(keys, batch.partition_id, [MULTI_MODAL_INPUTS]):
            yield row.get(MULTI_MODAL_INPUTS)
