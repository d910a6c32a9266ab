"""Rows in TransferQueue: listed, read, put, cleared, set aside. The only module that knows
TransferQueue."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import ray
import torch
import transfer_queue as tq
import transfer_queue.interface as tq_interface
from ray.actor import ActorHandle
from tensordict import TensorDict
from transfer_queue import BatchMeta
from transfer_queue import KVBatchMeta as KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError, plural
from verl_padding.pads.tags import is_padding
from verl_padding.plan.row_keys import uid_of_key

logger = logging.getLogger(__name__)

EXTRA_FIELDS = "extra_fields"
"""Field of a row with what its agent loop says beside verl's own fields."""
Shape = tuple[int, ...] | None
"""Of a field of a row; None of a value that is no tensor."""
_HELD: list[Any] = []
"""Storage of queues that were let go of: Ray ends an actor when the process that made it drops its
last handle."""


def is_connected() -> bool:
    """Whether this process has a TransferQueue."""
    return tq_interface._TQ_CLIENT is not None


def detach() -> None:
    """Leaves a TransferQueue without ending it: TransferQueue's own ``close`` ends the controller,
    whoever made it."""
    tq_interface._TQ_CLIENT.close()
    _HELD.append(tq_interface._TQ_STORAGE)
    tq_interface._TQ_CLIENT = tq_interface._TQ_CONTROLLER = tq_interface._TQ_STORAGE = None


def controller() -> ActorHandle:
    """TransferQueue's controller; a ValueError if there is none in this Ray cluster."""
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def rows_like(
    batch: KVBatchMeta, keys: Sequence[str], tags: Iterable[Mapping[str, Any]]
) -> KVBatchMeta:
    """Other rows of a batch's partition, each with a tag of its own, for a call with the batch's
    fields and extra_info.

    Values in tags are shared with the batch: ``KVBatchMeta`` would copy them, which takes most of
    the time of a call.
    """
    rows = KVBatchMeta(
        keys=list(keys),
        tags=[{}] * len(keys),
        partition_id=batch.partition_id,
        fields=None if batch.fields is None else list(batch.fields),
        extra_info=batch.extra_info or {},
    )
    rows.tags = [dict(tag) for tag in tags]
    return rows


def select_rows(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    """Some rows of a batch, by their numbers."""
    return rows_like(batch, [batch.keys[row] for row in rows], [batch.tags[row] for row in rows])


def n_rows(answer: object) -> int:
    """Rows in a worker's answer; 0 for an answer without rows."""
    return len(answer) if isinstance(answer, KVBatchMeta | BatchMeta) else 0


def tags_of(partition_id: str) -> dict[str, dict[str, Any]]:
    """Key -> tag of all prompts and rows in a partition."""
    return dict((tq.kv_list(partition_id) or {}).get(partition_id, {}))


def read_fields(
    keys: Sequence[str], partition_id: str, names: Sequence[str] | None = None
) -> TensorDict:
    """The fields that all of these rows have, or those of ``names`` among them."""
    meta = _look_up(keys, partition_id)
    there = list(meta.field_schema)
    chosen = there if names is None else [name for name in names if name in there]
    return tq.get_client().get_data(meta.select_fields(chosen))


def read_rows(
    keys: Sequence[str], partition_id: str, names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """As :func:`read_fields`, row by row."""
    rows = read_fields(keys, partition_id, names).unbind(0)
    # By name: items() would give tensordict's wrappers of plain values.
    return [{name: row[name] for name in list(row.keys())} for row in rows]


def read_extra_fields(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    """``extra_fields`` of each row, as its agent loop made them; empty where it has none."""
    if not keys:
        return []
    rows = read_fields(keys, partition_id, [EXTRA_FIELDS])
    extra_R = tu.get(rows, EXTRA_FIELDS, [{}] * len(keys))
    return [extra if isinstance(extra, Mapping) else {} for extra in extra_R]


def fields_of_all(keys: Sequence[str], partition_id: str) -> set[str]:
    """Names of the fields that all of these rows have; their values are not read."""
    return set(_look_up(keys, partition_id).field_schema)


def tokens_of_masks(batch: KVBatchMeta, name: str) -> list[int]:
    """Tokens that a mask of each row keeps, such as its ``response_mask``."""
    masks = read_fields(batch.keys, batch.partition_id, [name])[name]
    return [int(mask.sum()) for mask in masks.unbind()]


def _look_up(keys: Sequence[str], partition_id: str) -> BatchMeta:
    """What TransferQueue's controller knows about rows, in their order; a PaddingDataError if one
    is not there.

    Without their tags, which ``kv_batch_get`` copies, and ``kv_batch_put`` copies several times and
    sends back to the controller: most of the time of a put of a few columns.
    """
    meta: BatchMeta = tq.get_client().kv_retrieve_meta(keys=list(keys), partition_id=partition_id)
    if lost := len(keys) - len(meta.global_indexes):
        there = tags_of(partition_id)
        first = next((key for key in keys if key not in there), keys[0])
        raise PaddingDataError(
            f"row {first!r}: not in TransferQueue ({lost} of {len(keys)} rows are not). Leave a "
            f"step's rows in partition {partition_id!r} until it has ended."
        )
    meta.custom_meta = []  # a put then leaves those in the controller as they are
    return meta


def row_schemas(
    keys: Sequence[str], partition_id: str
) -> tuple[dict[frozenset[str], list[str]], dict[str, dict[str, Shape]], dict[str, torch.dtype]]:
    """What TransferQueue's controller knows about the fields of some rows; their data is not read.

    A PaddingDataError refuses a row that has a field in another dtype: TransferQueue stores it,
    does not list it, and says so in its log alone.

    Returns: the rows by the fields that they have; field that all rows have -> row -> shape; and
    tensor field of the partition -> dtype of its first put, which all others must have.
    """
    meta = _look_up(keys, partition_id)
    rows = list(meta.global_indexes)
    fields = ray.get(controller().__ray_call__.remote(_fields_of, partition_id, rows))
    for name, (dtype, _, unlisted_R) in fields.items():
        if unlisted := [*compress(keys, unlisted_R)]:
            raise PaddingDataError(
                f"field {name!r}: TransferQueue has stored it for row {unlisted[0]!r} without "
                "listing it: its dtype, or that of an earlier field, differs from the first "
                f"put's ({dtype or 'no tensor'}). Have all rows put each field in one dtype."
            )
    keys_by_fields: dict[frozenset[str], list[str]] = {}
    has_RF = zip(*(has_R for _, has_R, _ in fields.values()), strict=True)
    for key, has_F in zip(keys, has_RF, strict=True):
        keys_by_fields.setdefault(frozenset(compress(fields, has_F)), []).append(key)
    shapes = {}
    for name, schema in meta.field_schema.items():
        shape_R = schema.get("per_sample_shapes") or [schema["shape"]] * len(keys)
        shapes[name] = dict(zip(keys, shape_R, strict=True))
    dtypes = {name: dtype for name, (dtype, _, _) in fields.items() if dtype is not None}
    return keys_by_fields, shapes, dtypes


def _fields_of(
    queue: Any, partition_id: str, rows: list[int]
) -> dict[str, tuple[torch.dtype | None, list[bool], list[bool]]]:
    """Field -> its dtype, whether each row has it, and whether it has it without being listed."""
    # Runs in TransferQueue's controller. A put with a field in another dtype than the first put of
    # that field is stored, but listed only up to there.
    partition = queue.partitions[partition_id]
    fields = {}
    for name, column in partition.field_name_mapping.items():
        has_R = partition.production_status[rows, column].bool().tolist()
        meta = partition.field_metadata.get(name)
        listed = meta.global_indexes if meta else ()
        unlisted_R = [has and row not in listed for row, has in zip(rows, has_R, strict=True)]
        fields[name] = (meta.dtype if meta else None, has_R, unlisted_R)
    return fields


def jagged(value_R: Iterable[torch.Tensor]) -> torch.Tensor:
    """A column of values of their own length."""
    return torch.nested.as_nested_tensor(list(value_R), layout=torch.jagged)


def put_new_rows(rows: KVBatchMeta, fields: TensorDict) -> None:
    """Puts rows that are not there yet, with their tags, in one put."""
    tq.kv_batch_put(keys=rows.keys, partition_id=rows.partition_id, fields=fields, tags=rows.tags)


def put_columns(rows: KVBatchMeta, columns: Mapping[str, Any]) -> None:
    """Puts columns in the order of ``rows``, and makes a call with ``rows`` read them. Tags stay as
    they are."""
    if not columns:
        return
    meta = _look_up(rows.keys, rows.partition_id)
    tq.get_client().put(TensorDict(dict(columns), batch_size=len(rows)), metadata=meta)
    if rows.fields is not None:
        rows.fields = [*rows.fields, *(column for column in columns if column not in rows.fields)]


def clear(keys: Sequence[str], partition_id: str) -> None:
    """Takes rows out of TransferQueue."""
    if keys:
        tq.kv_clear(keys=list(keys), partition_id=partition_id)


@contextmanager
def set_aside(batches: Iterable[KVBatchMeta]) -> Iterator[None]:
    """Takes rows that are still there out of TransferQueue for a with-block; their fields wait in
    this process.

    The rows of one batch come back with the fields that all of them had.
    """
    kept: list[tuple[KVBatchMeta, TensorDict]] = []
    try:
        for batch in batches:
            tags = tags_of(batch.partition_id)
            keys = [key for key in batch.keys if key in tags]
            if keys:
                rows = rows_like(batch, keys, [tags[key] for key in keys])
                kept.append((rows, read_fields(keys, batch.partition_id)))
                clear(keys, batch.partition_id)
        yield
    finally:
        for rows, fields in kept:
            put_new_rows(rows, fields)


def clear_leftovers(partition_id: str) -> None:
    """Clears pads, and rows whose prompt is gone, with a warning: no step may read them.

    verl removes a prompt when it samples its rows. Rows without a prompt in the snapshot of a
    checkpoint were trained on, or were being trained on: they can never be sampled again, and would
    stay forever.
    """
    tags = tags_of(partition_id)
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt", False)}
    left = [
        key for key, tag in tags.items() if is_padding(tag) or not {key, uid_of_key(key)} & prompts
    ]
    if left:
        logger.warning(
            f"verl_padding: cleared {plural(len(left), 'key')} that an earlier trainer left in "
            f"TransferQueue (pads, and rows whose prompt was sampled): {first_few(left)}"
        )
        clear(left, partition_id)


def first_few(keys: Sequence[str]) -> str:
    """The first keys of some, for a message."""
    return ", ".join(sorted(keys)[:3]) + (", .." if len(keys) > 3 else "")
