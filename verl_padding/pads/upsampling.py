"""The verbs: pads come into a batch, pads go out of it, and real rows are told from pads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from tensordict import NonTensorStack, TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import COLUMN_DTYPES, IS_PADDING
from verl_padding.pads.lineage import EXTRA_FIELDS
from verl_padding.pads.loss_weighting import LOSS_WEIGHT
from verl_padding.pads.queue import KVBatchMeta, Listing, clear, list_rows, put_new_rows, read_rows, rows_like
from verl_padding.pads.roles import FieldRole
from verl_padding.pads.tags import LENGTH_TAGS, PAD_UID_PREFIX, PADDING_TAG, is_padding, wrong_tag
from verl_padding.pads.template import PAD_RESPONSE_LENGTH, Columns, PadTemplate, Schema, same_in_all
from verl_padding.plan.counted import counted
from verl_padding.plan.row_keys import row_key, uid_of_key

ROWS_PER_KIND = 4
"""Rows of different lengths that are read to find out what a field means."""
FIRST_LOOK, LOOK_FURTHER = 4, 4
"""Rows whose images are read first, and how many times more next: images are large, rows without them are small."""


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
        >>> padded = upsample(batch, multiple=8)
        >>> len(batch.keys), len(padded.keys), padded.tags[-1]["is_padding"]
        (5, 8, True)

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
        put_pads(pads, template.fields(SourceRows(batch).read(), n_pads=len(pads)))
    return rows_like(batch, [*batch.keys, *pads.keys], [*batch.tags, *pads.tags])


def strip(batch: KVBatchMeta) -> KVBatchMeta:
    """Takes the pads of a batch out of TransferQueue; returns its real rows, in their order. It may be called again.

    Example:
        >>> strip(upsample(batch, multiple=8)).keys == batch.keys
        True
    """
    clear([key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_padding(tag)], batch.partition_id)
    return real_rows(batch)


def real_rows(batch: Any) -> Any:
    """The batch without its pads, in the same order, for code that may get one; rows not marked as pads are real.

    Example:
        >>> real_rows([{"seq_len": 9}, {"seq_len": 2, "is_padding": True}])
        [{'seq_len': 9}]

    Args:
        batch: a ``KVBatchMeta``; a list of tags (dicts); a ``TensorDict`` or a ``DataProto`` of worker data, whose
            column ``is_padding`` (R,) says which rows are pads.

    Returns: the same type, with the real rows only.

    Raises:
        PaddingDataError: worker data holds only pads.
        TypeError: the batch is anything else.
    """
    if isinstance(batch, KVBatchMeta):
        return batch.select_keys([key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)])
    if isinstance(batch, list | tuple):
        return [tag for tag in batch if not is_padding(tag)]
    if isinstance(batch, TensorDict):
        return tu.index_select_tensor_dict(batch, _real_places(batch.get(IS_PADDING), len(batch)))
    if isinstance(batch, DataProto):
        column = batch.non_tensor_batch.get(IS_PADDING)
        if column is None and batch.batch is not None:
            column = batch.batch.get(IS_PADDING)
        return batch.select_idxs(_real_places(column, len(batch)))
    raise TypeError(f"{type(batch)}: real_rows takes a KVBatchMeta, a list of tags, a TensorDict or a DataProto")


def _real_places(is_pad: Any, n_rows: int) -> torch.Tensor:
    """Places of the real rows, by a column of any kind; all rows if there is no column."""
    if is_pad is None:
        return torch.arange(n_rows)
    values = is_pad.tolist() if hasattr(is_pad, "tolist") else list(is_pad)
    places = torch.nonzero(~torch.tensor(values, dtype=torch.bool).reshape(n_rows))[:, 0]
    if n_rows and not len(places):
        raise PaddingDataError(
            f"{counted(n_rows, 'row')}, and only pads: neither of verl's classes can hold jagged fields without a row. "
            f"Look at {IS_PADDING} first if a rank may hold only pads."
        )
    return places


def check_no_pads(batch: KVBatchMeta) -> None:
    """Refuses a batch that has a pad, with a PaddingDataError."""
    if pads := [key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_padding(tag)]:
        raise PaddingDataError(
            f"row {pads[0]!r}: tagged {PADDING_TAG}=True before any pad was made. A pad of an earlier step, or of "
            "another padding, is still in TransferQueue: clear it, or take the tag off."
        )


def new_pads(batch: KVBatchMeta, n_pads: int, template: PadTemplate) -> KVBatchMeta:
    """Keys and tags of pads that belong to no prompt of the batch; nothing is put yet."""
    uid = f"{PAD_UID_PREFIX}{uuid4().hex}"
    tag = {**batch.tags[0], **template.tag_lengths, PADDING_TAG: True}
    keys = [row_key(uid, session, 0) for session in range(n_pads)]
    return KVBatchMeta(keys=keys, tags=[tag] * n_pads, partition_id=batch.partition_id)


def put_pads(pads: KVBatchMeta, fields: Columns) -> None:
    """Puts pads into TransferQueue, in one put."""
    uid, sessions = same_in_all(uid_of_key(pads.keys[0]), len(pads)), NonTensorStack(*range(len(pads)))
    put_new_rows(pads, fields | {"uid": uid, "session_id": sessions})


class SourceRows:
    """The few rows of a batch that pads are made from; together they have every field that a row of it has.

    TransferQueue hands workers the fields that all rows of a call have. A field that only some rows have would vanish
    for those rows too if a pad among them lacked it, so pads have all fields. A PaddingDataError refuses a row that is
    not there, has no prompt or tags that do not match its fields, or has a field in another dtype than other rows, or
    under the name of a column of worker calls.
    """

    def __init__(self, batch: KVBatchMeta):
        self._batch = batch
        listing = list_rows(batch.keys, batch.partition_id)
        self._keys_by_fields = listing.keys_by_fields
        self.names = frozenset[str]().union(*listing.keys_by_fields)
        """Fields that a row of the batch has."""
        _check_all_listed(listing)
        _check_column_names(listing, self.names)
        lengths = _lengths(batch, listing)
        self._keys = [_of_different_lengths(keys, lengths) for keys in listing.keys_by_fields.values()]

    def keys_with(self, name: str) -> list[str]:
        """The rows that have a field."""
        return [key for names, keys in self._keys_by_fields.items() if name in names for key in keys]

    def weights(self) -> list[float]:
        """The weight of each row of the batch; rows without the field weigh 1, and one that is no weight is refused."""
        keys = self.keys_with(LOSS_WEIGHT)
        rows = read_rows(keys, self._batch.partition_id, [LOSS_WEIGHT]) if keys else []
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
    """Refuses a row that has its weight where no loss reads it, with a PaddingDataError."""
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
            f"neither that field nor those after it, and only logs a line. Have all rows put {name} and the fields "
            "before it in one dtype."
        )


def _check_column_names(listing: Listing, names: frozenset[str]) -> None:
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
            if tag.get(name, tokens) != tokens:
                raise wrong_tag(key, tag, name, f"its fields have {prompt} prompt and {response} response tokens")
    return lengths


def _of_different_lengths(keys: Sequence[str], lengths: Mapping[str, tuple[int, int]]) -> list[str]:
    found: dict[tuple[int, int], str] = {}
    for key in keys:
        found.setdefault(lengths[key], key)
    return list(found.values())[:ROWS_PER_KIND]
