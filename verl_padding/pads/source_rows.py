"""The rows in TransferQueue that pads are made from, checked before any pad is put."""

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import COLUMN_DTYPES
from verl_padding.pads.loss_weighting import LOSS_WEIGHT
from verl_padding.pads.queue import KVBatchMeta, Listing, list_rows, read_rows
from verl_padding.pads.tags import LENGTH_TAGS, wrong_tag
from verl_padding.plan.plural import plural

ROWS_PER_KIND = 4
"""Rows of different lengths that are read to find out what a field means."""
Key = TypeVar("Key", bound=Hashable)


class SourceRows:
    """The few rows of a batch that pads are made from; together they have every field that a row of
    it has.

    TransferQueue hands workers the fields that all rows of a call have. A field that only some rows
    have would vanish for those rows too if a pad among them lacked it, so pads have all fields. A
    PaddingDataError refuses a row that is not there, has no prompt or tags that do not match its
    fields, or has a field in another dtype than other rows, or under the name of a column of worker
    calls.
    """

    def __init__(self, batch: KVBatchMeta):
        self._batch = batch
        listing = list_rows(batch.keys, batch.partition_id)
        self._keys_by_fields = listing.keys_by_fields
        self.names = frozenset[str]().union(*listing.keys_by_fields)
        """Fields that a row of the batch has."""
        _check_all_listed(listing)
        _check_column_names(listing, self.names)
        for names, keys in listing.keys_by_fields.items():
            for name in ("prompts", "responses"):
                if name not in names:
                    raise missing_field(keys[0], name)
        lengths = _lengths(batch, listing)
        self._keys = [
            of_different_lengths(keys, lengths) for keys in listing.keys_by_fields.values()
        ]

    def keys_with(self, name: str) -> list[str]:
        """The rows that have a field."""
        return [
            key for names, keys in self._keys_by_fields.items() if name in names for key in keys
        ]

    def weights(self) -> list[float]:
        """The weight of each row of the batch; rows without the field weigh 1, and one that is no
        weight is refused."""
        keys = self.keys_with(LOSS_WEIGHT)
        rows = read_rows(keys, self._batch.partition_id, [LOSS_WEIGHT]) if keys else []
        weight_of = {
            key: _weight(key, row[LOSS_WEIGHT]) for key, row in zip(keys, rows, strict=True)
        }
        return [weight_of.get(key, 1.0) for key in self._batch.keys]

    def read(self) -> list[dict[str, Any]]:
        """The rows as they are now, each with its own fields; those of the most common kind come
        first."""
        return [row for keys in self._keys for row in read_rows(keys, self._batch.partition_id)]


def _weight(key: str, value: object) -> float:
    try:
        # Of a number, or a tensor that holds one; float() would read a text, too.
        weight = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise PaddingDataError(
            f"row {key!r}: {LOSS_WEIGHT}={value!r}: not a finite number of at least 0. Have the "
            "agent loop give the row such a weight, or none, which is a weight of 1."
        )
    return weight


def _check_all_listed(listing: Listing) -> None:
    for name, keys in listing.unlisted.items():
        dtype = listing.dtypes.get(name, "that of no tensor")
        raise PaddingDataError(
            f"field {name!r}: TransferQueue has stored it for row {keys[0]!r} "
            f"({plural(len(keys), 'row')} in all), but has not listed it, as it does with a dtype "
            f"other than that of the first put, {dtype}, and with all fields after it. Have all "
            f"rows put {name} and the fields before it in one dtype."
        )


def _check_column_names(listing: Listing, names: frozenset[str]) -> None:
    # Rows may have the columns of an earlier call: one number each, in the column's dtype.
    for name, dtype in COLUMN_DTYPES.items():
        found = listing.dtypes.get(name, "no tensor" if name in names else dtype)
        several = [s for s in listing.shapes.get(name, {}).values() if math.prod(s) != 1]
        if found != dtype or several:
            raise wrong_column(name, f"{found} of shape {several[0]}" if several else str(found))


def wrong_column(name: str, found: str) -> PaddingDataError:
    return PaddingDataError(
        f"field {name!r}: rows have it, as {found}, but workers get a column of this name from "
        f"the padding, one {COLUMN_DTYPES[name]} a row. Give the rows' field another name."
    )


def _lengths(batch: KVBatchMeta, listing: Listing) -> dict[str, tuple[int, int]]:
    """Prompt and response tokens of each row, by its fields where TransferQueue knows them, else by
    its tags."""
    lengths = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        prompts, responses = (listing.shapes[name].get(key) for name in ("prompts", "responses"))
        if prompts is None or responses is None:
            lengths[key] = tag.get("prompt_len"), tag.get("response_len")
            continue
        prompt, response = lengths[key] = prompts[0], responses[0]
        check_prompt(key, prompt)
        for name, tokens in zip(LENGTH_TAGS, (prompt, response, prompt + response), strict=True):
            if tag.get(name, tokens) != tokens:
                what = f"its fields have {prompt} prompt and {response} response tokens"
                raise wrong_tag(key, tag, name, what)
    return lengths


def of_different_lengths(keys: Iterable[Key], lengths: Mapping[Key, tuple[int, int]]) -> list[Key]:
    """The first row of each of a few lengths, prompt and response tokens."""
    # Rows of 5 + 3 and 4 + 3 tokens tell a field of prompts from one of responses; two of 4 + 4 do
    # not.
    found: dict[tuple[int, int], Key] = {}
    for key in keys:
        found.setdefault(lengths[key], key)
    return list(found.values())[:ROWS_PER_KIND]


def check_prompt(key: str | int, tokens: int) -> None:
    """Refuses a row whose prompt is empty, with a PaddingDataError."""
    if tokens == 0:
        raise PaddingDataError(
            f"row {key!r}: its prompt has no token. verl takes the log-prob of the first response "
            "token from the last token of the prompt: put a token there, such as that of the "
            "beginning."
        )


def missing_field(key: str | int, name: str) -> PaddingDataError:
    return PaddingDataError(
        f"row {key!r}: has no field {name!r}. The lengths of other fields follow from prompts and "
        "responses: put both into each row, without padding tokens."
    )
