"""The few real rows that pads are made from; together they have every field that a row of the batch has."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import COLUMN_DTYPES
from verl_padding.pads.lineage import EXTRA_FIELDS
from verl_padding.pads.loss_weighting import LOSS_WEIGHT
from verl_padding.pads.queue import KVBatchMeta, Listing, list_rows, read_rows
from verl_padding.pads.tags import LENGTH_TAGS, wrong_tag
from verl_padding.plan.counted import counted

ROWS_PER_KIND = 4
"""Rows of different lengths that are read to find out what a field means."""
FIRST_LOOK, LOOK_FURTHER = 4, 4
"""Rows whose images are read first, and how many times more next: images are large, rows without them are small."""


class SourceRows:
    """Rows of a batch, read when they are asked for.

    TransferQueue hands workers the fields that all rows of a call have. A field that only some rows have would vanish
    for those rows too if a pad among them lacked it, so pads have all fields.
    """

    def __init__(self, batch: KVBatchMeta):
        """Looks all rows of the batch up, and compares what TransferQueue knows about them with their tags.

        Raises:
            PaddingDataError: a row is not there, has no prompt or tags that do not match its fields, or has a field in
                another dtype than other rows, or under the name of a column of worker calls.
        """
        self._batch = batch
        listing = list_rows(batch.keys, batch.partition_id)
        _check_all_listed(listing)
        self.names = frozenset(name for names in listing.keys_by_fields for name in names)
        """Fields that a row of the batch has."""
        _check_column_names(listing, self.names)
        lengths = _lengths(batch, listing)
        self._keys = [_of_different_lengths(keys, lengths) for keys in listing.keys_by_fields.values()]
        self._keys_by_fields = listing.keys_by_fields

    def keys_with(self, name: str) -> list[str]:
        """The rows that have a field."""
        return [key for names, keys in self._keys_by_fields.items() if name in names for key in keys]

    def weights(self) -> list[float]:
        """The weight of each row of the batch; rows without the field weigh 1.

        Raises:
            PaddingDataError: a weight is no number, negative or not finite.
        """
        weight_of: dict[str, float] = {}
        if keys := self.keys_with(LOSS_WEIGHT):
            rows = read_rows(keys, self._batch.partition_id, [LOSS_WEIGHT])
            weight_of = {key: _weight(key, row[LOSS_WEIGHT]) for key, row in zip(keys, rows, strict=True)}
        return [weight_of.get(key, 1.0) for key in self._batch.keys]

    def read(self) -> list[dict[str, Any]]:
        """The rows as they are now, each with its own fields; those of the most common kind come first."""
        return [row for keys in self._keys for row in read_rows(keys, self._batch.partition_id)]


def find_images(batch: KVBatchMeta) -> Mapping[str, Any] | None:
    """``multi_modal_inputs`` of a row that has an image or a video; None if no row of the batch has one."""
    start, size = 0, FIRST_LOOK
    while start < len(batch):
        for row in read_rows(batch.keys[start : start + size], batch.partition_id, ["multi_modal_inputs"]):
            inputs: Mapping[str, Any] = row.get("multi_modal_inputs") or {}
            if any(name.startswith("pixel_values") for name in inputs):
                return inputs
        start, size = start + size, size * LOOK_FURTHER
    return None


def check_weight_is_a_field(rows: Iterable[Mapping[str, object]]) -> None:
    """
    Raises:
        PaddingDataError: one of these rows has its weight where no loss reads it.
    """
    for row in rows:
        extra = row.get(EXTRA_FIELDS)
        if isinstance(extra, Mapping) and LOSS_WEIGHT in extra:
            raise PaddingDataError(
                f"field {EXTRA_FIELDS!r}: {LOSS_WEIGHT}={extra[LOSS_WEIGHT]!r} is in it, but a weight is a field of "
                f"its own. Give the agent loop's output a class with the field {LOSS_WEIGHT}."
            )


def _weight(key: str, value: object) -> float:
    try:
        # Of a number, or a tensor that holds one; float() would read a text, too.
        weight = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise PaddingDataError(
            f"row {key!r}: {LOSS_WEIGHT}={value!r}: not a finite number of at least 0. Have the agent loop give the "
            "row such a weight, or none, which is a weight of 1."
        )
    return weight


def _check_all_listed(listing: Listing) -> None:
    for name, keys in listing.unlisted.items():
        dtype = listing.dtypes.get(name, "that of no tensor")
        raise PaddingDataError(
            f"field {name!r}: TransferQueue has stored it for row {keys[0]!r} ({counted(len(keys), 'row')} in all), "
            f"but has not listed it. It takes one dtype per field, here {dtype}; if a put has another, it lists "
            "neither that field nor those after it, and only logs a line. Have all rows put "
            f"{name} and the fields before it in one dtype."
        )


def _check_column_names(listing: Listing, names: Collection[str]) -> None:
    # Rows may have the columns of an earlier call: one number each, in the column's dtype.
    for name, dtype in COLUMN_DTYPES.items():
        found = listing.dtypes.get(name, "no tensor" if name in names else dtype)
        several = [f" of shape {shape}" for shape in listing.shapes.get(name, {}).values() if math.prod(shape) != 1]
        if found != dtype or several:
            raise PaddingDataError(
                f"field {name!r}: rows have it, as {found}{several[0] if several else ''}, but a padded trainer gives "
                f"its workers a column of this name, one {dtype} a row. Give the rows' field another name."
            )


def _lengths(batch: KVBatchMeta, listing: Listing) -> dict[str, tuple[int, int]]:
    """Prompt and response tokens of each row, by its fields where TransferQueue knows them, else by its tags."""
    lengths = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        prompts, responses = (listing.shapes[name].get(key) for name in ("prompts", "responses"))
        if prompts is None or responses is None:
            lengths[key] = tag.get("prompt_len"), tag.get("response_len")
            continue
        prompt, response = lengths[key] = prompts[0], responses[0]
        if prompt == 0:
            raise PaddingDataError(
                f"row {key!r}: its prompt has no token. verl takes the log-prob of the first response token from the "
                "last token of the prompt: put a token there, a begin-of-sequence token or whatever the model starts "
                "with."
            )
        for name, tokens in zip(LENGTH_TAGS, (prompt, response, prompt + response), strict=True):
            if name in tag and tag[name] != tokens:
                what = f"its fields have {prompt} prompt and {response} response tokens"
                raise wrong_tag(key, tag, name, what)
    return lengths


def _of_different_lengths(keys: Sequence[str], lengths: Mapping[str, tuple[int, int]]) -> list[str]:
    found: dict[tuple[int, int], str] = {}
    for key in keys:
        found.setdefault(lengths[key], key)
    return list(found.values())[:ROWS_PER_KIND]
