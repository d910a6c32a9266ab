"""The weights that agent loops give rows, read and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import KVBatchMeta, read_rows
from verl_padding.pads.weighing import LOSS_WEIGHT

EXTRA_FIELDS = "extra_fields"
"""Field of verl's rows with what agent loops say beside them."""


def read_weights(batch: KVBatchMeta, keys_with_weight: Sequence[str]) -> list[float]:
    """The weight of each row of a batch; rows without the field weigh 1.

    Raises:
        PaddingDataError: a weight is no number, negative or not finite.
    """
    weight_of: dict[str, float] = {}
    if keys_with_weight:
        rows = read_rows(keys_with_weight, batch.partition_id, [LOSS_WEIGHT])
        weight_of = {key: _weight(key, row[LOSS_WEIGHT]) for key, row in zip(keys_with_weight, rows, strict=True)}
    return [weight_of.get(key, 1.0) for key in batch.keys]


def refuse_misplaced_weight(rows: Iterable[Mapping[str, object]]) -> None:
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
