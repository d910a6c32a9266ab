"""Pads in TransferQueue: put in, ordered into worker calls, taken out. The only module that knows TransferQueue."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import BatchMeta, KVBatchMeta

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX, PADDING_TAG, is_padding
from verl_padding.pads.template import PadTemplate
from verl_padding.plan import BatchPlan, Layout

logger = logging.getLogger(__name__)

IS_PADDING = "is_padding"
"""Column (R,) bool in an update: the row is a pad."""
REAL_ROWS = "mini_batch_real_rows"
"""Column (R,) int64 in an update: real rows in the row's mini-batch, over all ranks."""
REPORTING_RANKS = "mini_batch_reporting_ranks"
"""Column (R,) int64 in an update: data-parallel ranks that hold a real row of the row's mini-batch."""
SESSION_ROWS = "mini_batch_session_rows"
"""Column (R,) int64 in an update: rows of the row's session in its mini-batch; 0 for a pad."""
SESSIONS = "mini_batch_sessions"
"""Column (R,) int64 in an update: sessions that have a row in the row's mini-batch."""
MICRO_BATCH = "micro_batch"
"""Column (R,) int64 in every call of a plan that cuts the micro-batches: number of the row's one in its cell."""

OWN_COLUMNS = frozenset({IS_PADDING, REAL_ROWS, REPORTING_RANKS, SESSION_ROWS, SESSIONS, MICRO_BATCH})

SCHEMA_ROWS = 4
"""Real rows, of different lengths where there are any, that are read to tell what an unknown field means."""


class PaddedBatch:
    """A batch of real rows, its plan, and the pads that wait in TransferQueue for the worker calls.

    The trainer keeps the real rows; a worker call gets the rows of its layout, real ones and pads, in the order
    in which verl deals them out. Made by :func:`upsample`, undone by :func:`strip`.
    """

    def __init__(self, batch: KVBatchMeta, plan: BatchPlan, pad_keys: list[str], pad_tag: dict, maker: _PadMaker):
        self.batch = batch
        self.plan = plan
        self.pad_keys = pad_keys
        self._pad_tag = pad_tag
        self._maker = maker

    def inference_call(self, call: str, batch: KVBatchMeta) -> KVBatchMeta:
        """The rows of a log-prob, reference or value pass; ``batch`` brings fields and extra_info."""
        layout = self.plan.layouts[call]
        rows = self._rows_of(layout, batch)
        self._put_columns(rows, self._micro_batch_column(layout))
        return rows

    def update_call(self, call: str, batch: KVBatchMeta) -> KVBatchMeta:
        """The rows of an update, with what the loss must know of each row's mini-batch as columns.

        ``mini_batch_size`` gives way to ``num_mini_batch``: verl then cuts each rank's rows into equal parts,
        whatever their size. verl's own shuffle is off, for it would mix rows of different mini-batches.
        """
        layout = self.plan.layouts[call]
        self._complete_pads(layout.n_pads)
        rows = self._rows_of(layout, batch)
        self._put_columns(rows, self._loss_columns(layout) | self._micro_batch_column(layout))
        rows.extra_info.pop("mini_batch_size", None)
        rows.extra_info["num_mini_batch"] = layout.n_mini_batches
        rows.extra_info["dataloader_kwargs"] = {
            **rows.extra_info.get("dataloader_kwargs", {}),
            "shuffle": False,
        }
        return rows

    def real_output(self, output: KVBatchMeta, batch: KVBatchMeta) -> KVBatchMeta:
        """A worker's answer for the padded rows, as one for the rows of ``batch``."""
        return KVBatchMeta(
            keys=list(batch.keys),
            tags=batch.tags,
            partition_id=output.partition_id,
            fields=output.fields,
            extra_info=output.extra_info,
        )

    def _rows_of(self, layout: Layout, batch: KVBatchMeta) -> KVBatchMeta:
        assert sorted(batch.keys) == sorted(self.batch.keys), "the batch changed between plan and worker call"
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        keys = [*self.batch.keys, *self.pad_keys]
        ordered = [keys[row] for row in layout.order]
        return KVBatchMeta(
            keys=ordered,
            tags=[tags.get(key, self._pad_tag) for key in ordered],
            partition_id=batch.partition_id,
            fields=None if batch.fields is None else list(batch.fields),
            extra_info=dict(batch.extra_info or {}),
        )

    def _complete_pads(self, n_pads: int) -> None:
        """Gives pads the fields that the trainer has added to the real rows since they were made.

        TransferQueue hands workers the fields that all rows of a call have: without this, ``advantages`` would
        vanish from every rank that holds a pad.
        """
        if not n_pads:
            return
        fields = self._maker.new_fields()
        if fields:
            tq.kv_batch_put(
                keys=self.pad_keys[:n_pads],
                partition_id=self.batch.partition_id,
                fields=_columns(fields, n_pads),
            )

    def _loss_columns(self, layout: Layout) -> dict[str, torch.Tensor]:
        n_rows = len(self.batch)
        mini_batch_of = [
            mini_batch
            for _ in range(layout.dp_size)
            for mini_batch in range(layout.n_mini_batches)
            for _ in range(layout.rows_per_cell)
        ]
        session_R = [key.rsplit("_", 1)[0] for key in self.batch.keys]
        rows_of_sessions_M = [
            Counter(session_R[row] for cell in ranks for row in cell if row < n_rows) for ranks in layout.cells
        ]
        return {
            IS_PADDING: torch.tensor([row >= n_rows for row in layout.order]),
            REAL_ROWS: torch.tensor([layout.real_rows_M[m] for m in mini_batch_of]),
            REPORTING_RANKS: torch.tensor([layout.reporting_ranks_M[m] for m in mini_batch_of]),
            SESSION_ROWS: torch.tensor(
                [
                    rows_of_sessions_M[m][session_R[row]] if row < n_rows else 0
                    for m, row in zip(mini_batch_of, layout.order, strict=True)
                ]
            ),
            SESSIONS: torch.tensor([len(rows_of_sessions_M[m]) for m in mini_batch_of]),
        }

    def _micro_batch_column(self, layout: Layout) -> dict[str, torch.Tensor]:
        if self.plan.packer != "plan" or layout.micro_batch_rows is None:
            return {}
        numbers = [
            number
            for rank in range(layout.dp_size)
            for rows_DK in layout.micro_batch_rows
            for number, rows in enumerate(rows_DK[rank])
            for _ in range(rows)
        ]
        return {MICRO_BATCH: torch.tensor(numbers)}

    @staticmethod
    def _put_columns(rows: KVBatchMeta, columns: dict[str, torch.Tensor]) -> None:
        """Puts columns in the order of ``rows``, and has the call read them."""
        if not columns:
            return
        tq.kv_batch_put(
            keys=rows.keys,
            partition_id=rows.partition_id,
            fields=TensorDict(columns, batch_size=len(rows.keys)),
        )
        if rows.fields is not None:
            rows.fields = [*rows.fields, *(column for column in columns if column not in rows.fields)]


def upsample(batch: KVBatchMeta, plan: BatchPlan, template: PadTemplate) -> PaddedBatch:
    """Puts the pads that ``plan`` asks for into TransferQueue, in one put, and leaves ``batch`` as it is.

    Raises:
        PaddingDataError: a real row tagged as padding, or a field that no pad can be made for.
    """
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        if is_padding(tag):
            raise PaddingDataError(
                f"row {key!r}: tagged {PADDING_TAG}=True before any pad was made. A pad of an earlier step, or of "
                "another padding, is still in TransferQueue: clear it, or take the tag off."
            )
    maker = _PadMaker(batch, template)
    uid = f"{PAD_UID_PREFIX}{uuid4().hex}"
    pad_keys = [f"{uid}_{session}_0" for session in range(plan.n_pads)]
    pad_tag = {**batch.tags[0], **template.tag_lengths, PADDING_TAG: True}
    padded = PaddedBatch(batch, plan, pad_keys, pad_tag, maker)
    if pad_keys:
        fields = maker.first_fields()
        fields["uid"] = uid
        try:
            tq.kv_batch_put(
                keys=pad_keys,
                partition_id=batch.partition_id,
                fields=_columns(fields, len(pad_keys), session_id=range(len(pad_keys))),
                tags=[pad_tag] * len(pad_keys),
            )
        except BaseException:
            # A put may fail half way, some keys written: leave nothing behind, and let the first error speak.
            try:
                strip(padded)
            except Exception:
                logger.exception("verl_padding: pads %s.. could not be cleared after a failed put", pad_keys[0])
            raise
    return padded


def n_rows(answer: object) -> int:
    """Rows that a worker's answer speaks of; 0 for an answer that speaks of none."""
    return len(answer) if isinstance(answer, KVBatchMeta | BatchMeta) else 0


def strip(padded: PaddedBatch) -> KVBatchMeta:
    """Takes the pads out of TransferQueue; returns the batch that :func:`upsample` was given. May be repeated."""
    if padded.pad_keys:
        tq.kv_clear(keys=padded.pad_keys, partition_id=padded.batch.partition_id)
        padded.pad_keys = []
    return padded.batch


class _PadMaker:
    """Reads real rows from TransferQueue and makes pad fields of them, new ones as the step goes on."""

    def __init__(self, batch: KVBatchMeta, template: PadTemplate):
        self._partition_id = batch.partition_id
        self._template = template
        self._source_keys = _rows_of_different_lengths(batch, SCHEMA_ROWS)
        self._first: set[str] = set()

    def first_fields(self) -> dict[str, Any]:
        rows = self._read()
        names = [name for name in rows[0] if all(name in row for row in rows)]
        self._first = set(names)
        return self._template.fields(rows, names)

    def new_fields(self) -> dict[str, Any]:
        rows = self._read()
        names = [name for name in rows[0] if name not in self._first | OWN_COLUMNS and all(name in row for row in rows)]
        return self._template.fields(rows, names)

    def _read(self) -> list[dict[str, Any]]:
        data = tq.kv_batch_get(keys=self._source_keys, partition_id=self._partition_id)
        rows = data.unbind(0)
        # By name: items() would give tensordict's wrappers of plain values.
        return [{name: row[name] for name in list(row.keys())} for row in rows]


def _rows_of_different_lengths(batch: KVBatchMeta, most: int) -> list[str]:
    keys: dict[tuple[int, int], str] = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        keys.setdefault((tag["prompt_len"], tag["response_len"]), key)
    return list(keys.values())[:most]


def _columns(fields: dict[str, Any], n_rows: int, **per_row: Sequence[Any]) -> TensorDict:
    """The same row ``n_rows`` times, as columns that share its values."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if name in per_row:
            columns[name] = NonTensorStack(*per_row[name])
        elif not isinstance(value, torch.Tensor):
            # Wrapped once: left to the stack, wrapping each anew would take most of the time of an upsample.
            columns[name] = NonTensorStack(*[NonTensorData(value)] * n_rows)
        else:
            # Dense, though the real rows' columns are jagged: TransferQueue keeps rows one by one and packs a call's
            # rows anew, and a dense column goes in five times faster.
            columns[name] = value.expand(n_rows, *value.shape).contiguous()
    return TensorDict(columns, batch_size=n_rows)
