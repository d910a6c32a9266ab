"""The real rows that pads are made from: few of them, and between them every field that a row of the batch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.pads.queue import KVBatchMeta, keys_by_fields, read_rows

ROWS_PER_KIND = 4
"""Rows of different lengths that are read to tell what a field means."""
FIRST_LOOK, LOOK_FURTHER = 4, 4
"""Rows whose images are read first, and how many times as many next: images are large, rows without them small."""


class SourceRows:
    """Rows of a batch, read when they are asked for.

    TransferQueue hands workers the fields that all rows of a call have. A field that only some rows have would vanish
    for these as well if a pad came between them without it, so pads have them all.
    """

    def __init__(self, batch: KVBatchMeta):
        self._batch = batch
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        self._keys = [
            _of_different_lengths(keys, tags) for keys in keys_by_fields(batch.keys, batch.partition_id).values()
        ]

    def read(self) -> list[dict[str, Any]]:
        """The rows as they are now, those of the most common kind first, each with its own fields."""
        return [row for keys in self._keys for row in read_rows(keys, self._batch.partition_id)]


def find_images(batch: KVBatchMeta) -> Mapping[str, Any] | None:
    """``multi_modal_inputs`` of some row that has an image or a video; None if no row of the batch has."""
    start, size = 0, FIRST_LOOK
    while start < len(batch):
        for row in read_rows(batch.keys[start : start + size], batch.partition_id, ["multi_modal_inputs"]):
            inputs: Mapping[str, Any] | None = row.get("multi_modal_inputs")
            if inputs and any(name.startswith("pixel_values") for name in inputs):
                return inputs
        start, size = start + size, size * LOOK_FURTHER
    return None


def _of_different_lengths(keys: Sequence[str], tags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found: dict[tuple[int, int], str] = {}
    for key in keys:
        found.setdefault((tags[key]["prompt_len"], tags[key]["response_len"]), key)
    return list(found.values())[:ROWS_PER_KIND]
