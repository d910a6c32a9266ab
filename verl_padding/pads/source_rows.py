"""The rows in TransferQueue that pads are made from, checked before any pad is put."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl_padding.errors import PaddingDataError
from verl_padding.pads.loss_weighting import LOSS_WEIGHT
from verl_padding.pads.planned_call import COLUMN_DTYPES, IS_PADDING
from verl_padding.pads.queue import KVBatchMeta, Shape, read_rows, row_schemas
from verl_padding.pads.tags import LENGTH_TAGS, check_no_pads, is_padding

TOKEN_FIELDS = "prompts", "responses"
"""Fields of every row, (tokens,) each, from whose lengths those of other fields follow."""
ROWS_PER_KIND = 4
"""Rows of different lengths that are read to find out what a field means."""


class SourceRows:
    """The few rows of a batch that pads are made from; together they have every field that a row of
    it has.

    TransferQueue hands workers the fields that all rows of a call have. A field that only some rows
    have would vanish for those rows too if a pad among them lacked it, so pads have all fields. A
    PaddingDataError refuses a row that is not there, is marked as a pad, has no prompt or tags that
    do not match its fields, or has a field in another dtype than other rows, or one with the name
    of a column of worker calls that is not one value in the column's dtype.
    """

    def __init__(self, batch: KVBatchMeta):
        self._batch = batch
        check_no_pads(batch.keys, map(is_padding, batch.tags))
        self._keys_by_fields, shapes, dtypes = row_schemas(batch.keys, batch.partition_id)
        self._check_columns(dtypes)
        for names, keys in self._keys_by_fields.items():
            for name in TOKEN_FIELDS:
                if name not in names:
                    raise missing_field(keys[0], name)
        lengths = _lengths(batch, shapes)
        self._keys = [
            _of_different_lengths(keys, lengths) for keys in self._keys_by_fields.values()
        ]

    def keys_with(self, name: str) -> list[str]:
        """The rows that have a field."""
        return [
            key for names, keys in self._keys_by_fields.items() if name in names for key in keys
        ]

    def _column(self, name: str) -> tuple[list[str], list[Any]]:
        """The rows that have a field, and the value of each."""
        keys = self.keys_with(name)
        rows = read_rows(keys, self._batch.partition_id, [name]) if keys else []
        return keys, [row[name] for row in rows]

    def _check_columns(self, dtypes: Mapping[str, torch.dtype]) -> None:
        for name, dtype in COLUMN_DTYPES.items():
            keys, values = self._column(name)
            fits = all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values)
            # A column has one dtype in the partition, whichever rows have it.
            if not fits or dtypes.get(name, dtype) != dtype:
                raise PaddingDataError(
                    f"field {name!r}: the padding sends workers a column of this name, one {dtype} "
                    "per row. Give the rows' field another name."
                )
            if name == IS_PADDING:
                check_no_pads(keys, values)

    def weights(self) -> list[float]:
        """The weight of each row of the batch; rows without the field weigh 1, and one that is no
        weight is refused."""
        keys, weights = self._column(LOSS_WEIGHT)
        weight_of = {key: _weight(key, weight) for key, weight in zip(keys, weights, strict=True)}
        return [weight_of.get(key, 1.0) for key in self._batch.keys]

    def read(self) -> list[dict[str, Any]]:
        """The rows as they are now, each with its own fields."""
        return [row for keys in self._keys for row in read_rows(keys, self._batch.partition_id)]


def _weight(key: str, value: object) -> float:
    try:
        # Of a number, or a tensor that holds one; float() would read a text, too.
        weight = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    # So that float32 holds what a gradient is multiplied by, whatever the other rows weigh.
    if not (weight == 0 or 1e-9 <= weight <= 1e9):
        raise PaddingDataError(
            f"row {key!r}: {LOSS_WEIGHT}={value!r}: not 0, nor a number from 1e-9 to 1e9. Correct "
            "it in the agent loop."
        )
    return weight


def _lengths(
    batch: KVBatchMeta, shapes: Mapping[str, Mapping[str, Shape]]
) -> dict[str, tuple[int, int]]:
    """Prompt and response tokens of each row, which its tags have to agree with."""
    lengths = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        prompts, responses = (shapes[name][key] for name in TOKEN_FIELDS)
        if not prompts or not responses:
            raise missing_field(key, "responses" if prompts else "prompts")
        prompt, response = lengths[key] = prompts[0], responses[0]
        check_prompt(key, prompt)
        for name, tokens in zip(LENGTH_TAGS, (prompt, response, prompt + response), strict=True):
            if tag.get(name, tokens) != tokens:
                raise PaddingDataError(
                    f"row {key!r}: tag {name}={tag[name]!r}, but its fields have {prompt} prompt "
                    f"and {response} response tokens. Tag it with these and their sum."
                )
    return lengths


def _of_different_lengths(keys: Iterable[str], lengths: Mapping[str, tuple[int, int]]) -> list[str]:
    """The first row of each of a few lengths, prompt and response tokens."""
    # Rows of 5 + 3 and 4 + 3 tokens tell a field of prompts from one of responses; two of 4 + 4 do
    # not.
    key_of: dict[tuple[int, int], str] = {}
    for key in keys:
        key_of.setdefault(lengths[key], key)
    return list(key_of.values())[:ROWS_PER_KIND]


def check_prompt(key: str | int, tokens: int) -> None:
    """Refuses a row whose prompt is empty, with a PaddingDataError."""
    if tokens == 0:
        raise PaddingDataError(
            f"row {key!r}: its prompt has no token. verl takes the log-prob of the first response "
            "token from the last of the prompt. Put one there."
        )


def missing_field(key: str | int, name: str) -> PaddingDataError:
    return PaddingDataError(
        f"row {key!r}: has no field {name!r} of tokens, from which the lengths of other fields "
        "follow. Put it into each row."
    )
