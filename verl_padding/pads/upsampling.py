"""The two verbs: pads come into a batch, pads go out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from uuid import uuid4

from tensordict import NonTensorStack

from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import KVBatchMeta, clear, put_new_rows, rows_like
from verl_padding.pads.real_rows import real_rows
from verl_padding.pads.roles import FieldRole
from verl_padding.pads.schema import Row, Schema
from verl_padding.pads.source import SourceRows
from verl_padding.pads.tags import PAD_UID_PREFIX, PADDING_TAG, is_padding
from verl_padding.pads.template import PAD_RESPONSE_LENGTH, Columns, PadTemplate, same_in_all
from verl_padding.plan.row_keys import row_key, uid_of_key


def upsample(
    batch: KVBatchMeta,
    multiple: int,
    *,
    eos_token_id: int = 0,
    length: int = 1 + PAD_RESPONSE_LENGTH,
    roles: Mapping[str, FieldRole] | None = None,
) -> KVBatchMeta:
    """Appends pads to a batch in TransferQueue until ``multiple`` divides its number of rows.

    A pad is a row tagged ``is_padding`` with all fields of the batch's own rows, of the same dtypes and ranks, masks of
    zero and neutral values. :func:`strip` takes the pads out again.

    Example:
        >>> padded = upsample(batch, multiple=8)  # doctest: +SKIP
        >>> len(batch), len(padded), padded.tags[-1]["is_padding"]  # doctest: +SKIP
        (61, 64, True)
        >>> strip(padded).keys == batch.keys  # doctest: +SKIP
        True

    Args:
        multiple: rows, such as the lcm of data-parallel size and mini-batches.
        eos_token_id: the token of which a pad consists.
        length: tokens of a pad; engines that round rows up may want more.
        roles: of fields whose role does not follow from the rows (``padding.fields``).

    Returns: the batch's rows, and behind them the pads.

    Raises:
        ValueError: ``multiple`` is no positive number.
        PaddingDataError: the batch has no row, has a pad already, or has a field that no pad can be made for; nothing
            is put.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: a number of rows divides by no number below 1. Give at least 1.")
    check_no_pads(batch)
    if not batch.keys:
        raise PaddingDataError("a batch without a row: pads are made from real rows. Leave such a batch out.")
    template = PadTemplate(eos_token_id=eos_token_id, length=length, schema=Schema(roles))
    pads = new_pads(batch, -len(batch) % multiple, template)
    if pads.keys:
        put_pads(pads, fields_of_pads(SourceRows(batch).read(), template, len(pads)))
    tags = [*batch.tags, *pads.tags]
    return rows_like(batch, [*batch.keys, *pads.keys], tags, batch.fields, batch.extra_info or {})


def strip(batch: KVBatchMeta) -> KVBatchMeta:
    """Takes the pads of a batch out of TransferQueue; returns its real rows, in their order. It may be called again."""
    clear([key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_padding(tag)], batch.partition_id)
    kept: KVBatchMeta = real_rows(batch)
    return kept


def check_no_pads(batch: KVBatchMeta) -> None:
    """
    Raises:
        PaddingDataError: a row is tagged as padding.
    """
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        if is_padding(tag):
            raise PaddingDataError(
                f"row {key!r}: tagged {PADDING_TAG}=True before any pad was made. A pad of an earlier step, or of "
                "another padding, is still in TransferQueue: clear it, or take the tag off."
            )


def new_pads(batch: KVBatchMeta, n_pads: int, template: PadTemplate) -> KVBatchMeta:
    """Keys and tags of pads that belong to no prompt of the batch; nothing is put yet."""
    uid = f"{PAD_UID_PREFIX}{uuid4().hex}"
    tag = {**batch.tags[0], **template.tag_lengths, PADDING_TAG: True}
    keys = [row_key(uid, session, 0) for session in range(n_pads)]
    return KVBatchMeta(keys=keys, tags=[tag] * n_pads, partition_id=batch.partition_id)


def fields_of_pads(
    rows: Sequence[Row], template: PadTemplate, n_pads: int, *, leave_out: Collection[str] = ()
) -> Columns:
    """What pads hold, shaped from real rows, but for the fields that are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    return template.fields(rows, [name for name in names if name not in leave_out], n_pads)


def put_pads(pads: KVBatchMeta, fields: Columns) -> None:
    """Puts pads into TransferQueue, in one put."""
    uid, sessions = same_in_all(uid_of_key(pads.keys[0]), len(pads)), NonTensorStack(*range(len(pads)))
    put_new_rows(pads, fields | {"uid": uid, "session_id": sessions})
