"""Pads, made from real rows: what each field means for a pad, and a neutral value of its dtype and
rank."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from verl_padding.errors import PaddingDataError
from verl_padding.pads.field_kinds import (
    FOUND_BY_LENGTH,
    KNOWN_FIELDS,
    FieldFormat,
    Fill,
    Kind,
)
from verl_padding.pads.tags import LENGTH_TAGS
from verl_padding.pads.vision_families import SmallestImage

PAD_RESPONSE_LENGTH = 1
ROWS_NAMED = 4
"""Rows whose lengths a message names."""
EMPTY_OF_ITSELF = (bool, int, float, str, bytes, list, tuple, set)
Row = Mapping[str, Any]
"""Fields of a row by name, ``prompts`` and ``responses`` (tokens,) among them."""
Columns = dict[str, torch.Tensor | NonTensorStack]
"""Field -> its values in some rows, one a row."""


class Schema:
    """Field name -> kind, for one job: a kind that was found once is kept as long as later rows
    agree.

    A batch may be a single row, whose lengths say little; earlier batches have said more. Kinds
    that are ``declared`` in ``padding.fields`` come before all else.
    """

    def __init__(self, declared: Mapping[str, FieldFormat] | None = None):
        self._declared = declared or {}
        self._found: dict[str, FieldFormat] = {}

    def format_of(
        self, name: str, rows: Sequence[Row], pad_lengths: tuple[int, int]
    ) -> FieldFormat:
        """The kind of a field, declared, known, or found from its shapes in real rows of different
        lengths.

        Kinds that give a pad the same length, of ``pad_lengths`` prompt and response tokens, need
        no choice. Where no kind fits, or several do and nothing says which, this raises a
        PaddingDataError.
        """
        values, declared = [row[name] for row in rows], self._declared.get(name)
        known = declared or KNOWN_FIELDS.get(name) or self._found.get(name)
        if known is not None:
            if _fits(known.kind, values, rows):
                return known
            # Of a list or an array, a pad would get an empty one, where verl reads a value per
            # token.
            no_tensor = isinstance(values[0], (list, np.ndarray))
            if declared or (no_tensor and known.kind in FOUND_BY_LENGTH):
                raise _unclear(name, rows, f"are not those of kind {known.kind.value}.")
        fitting = _kinds_that_fit(values, rows)
        # Masks of one token beside responses of one and two are wrong, and not one value a row.
        if name in KNOWN_FIELDS and KNOWN_FIELDS[name].kind.tokens(1, 1) is not None:
            fitting = [kind for kind in fitting if kind is not Kind.ROW]
        # In rows of 4 + 4 tokens, a field of 4 is of prompts or of responses. A pad of 1 + 1 has
        # one value in either case.
        pad_sizes = {
            values[0].shape[0] if kind is Kind.ROW else kind.tokens(*pad_lengths)
            for kind in (fitting if len(fitting) > 1 else [])
        }
        if not fitting or len(pad_sizes) > 1:
            named = " and ".join(kind.value for kind in fitting)
            raise _unclear(name, rows, f"fit {named or 'no kind'}.")
        field = FieldFormat(fitting[0], known.fill if known else Fill.ZERO)
        # Not kept: one of several, since later rows may say more and other pads be longer; nor an
        # object, which fits anything: a field that was None so far may yet hold tensors.
        if len(fitting) == 1 and field.kind is not Kind.OBJECT:
            self._found[name] = field
        return field


def _unclear(name: str, rows: Sequence[Row], what: str) -> PaddingDataError:
    rows = rows[:ROWS_NAMED]
    fix = (
        f"Set its kind, in a job by +padding.fields.{name}=response (or prompt, sequence, row, "
        f"object), in a call of upsample by fields={{{name!r}: FieldFormat(Kind.RESPONSE)}}"
    )
    if _shape(rows[0][name]) is None:
        fix = "Store it as a tensor"
    return PaddingDataError(
        f"field {name!r}: its kind is unclear. Its shapes {[_shape(row[name]) for row in rows]} "
        f"in rows of (prompt, response) lengths {[_lengths(row) for row in rows]} {what} {fix}."
    )


def _kinds_that_fit(values: Sequence[Any], rows: Sequence[Row]) -> list[Kind]:
    if not isinstance(values[0], torch.Tensor):
        return [Kind.OBJECT]
    if values[0].ndim == 0:
        return [Kind.ROW]
    fitting = [kind for kind in FOUND_BY_LENGTH if _fits(kind, values, rows)]
    # If a length follows the tokens of rows of different lengths, it is no accident; if it never
    # changes, it may be.
    lengths = {_lengths(row) for row in rows}
    if _fits(Kind.ROW, values, rows) and (len(lengths) > 1 or not fitting):
        fitting.append(Kind.ROW)
    return fitting


def _fits(kind: Kind, values: Sequence[Any], rows: Sequence[Row]) -> bool:
    shapes = [_shape(value) for value in values]
    if kind in (Kind.OBJECT, Kind.MULTIMODAL):
        return True
    if kind is Kind.ROW:
        return len(set(shapes)) == 1
    axis = -1 if kind is Kind.POSITIONS else 0
    return all(
        s and s[axis] == kind.tokens(*_lengths(row)) for s, row in zip(shapes, rows, strict=True)
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _lengths(row: Row) -> tuple[int, int]:
    return len(row["prompts"]), len(row["responses"])


class PadTemplate:
    """Makes the fields of pads from those of real rows.

    A pad has ``length - 1`` prompt tokens and one response token, all end-of-sequence except those
    of an image, and masks of zero. From a row of 5 prompt and 3 response tokens, with ``length=4``:
    ``input_ids`` (8,) -> (4,), ``rm_scores`` (3,) -> (1,), ``position_ids`` (3, 8) -> (3, 4),
    ``teacher_ids`` (8, 20) -> (4, 20).

    Args:
        length: tokens of a pad; None for the fewest: a response, and a prompt of at least one
            token, with the image at its end.
        image: what pads show the model's vision tower; None for nothing.
    """

    def __init__(
        self,
        *,
        eos_token_id: int,
        length: int | None = None,
        schema: Schema | None = None,
        image: SmallestImage | None = None,
    ):
        shortest = max(1, len(image.token_ids) if image else 0) + PAD_RESPONSE_LENGTH
        self.length = shortest if length is None else length
        if self.length < shortest:
            raise PaddingDataError(
                f"length={length}: the prompt of a pad has at least one token, or those of the "
                f"model's smallest image. Give {shortest}."
            )
        self._lengths = (self.length - PAD_RESPONSE_LENGTH, PAD_RESPONSE_LENGTH)
        self._fills = {Fill.EOS: eos_token_id, Fill.ONE: 1}
        self._schema = schema or Schema()
        self._image = image

    @property
    def tag_lengths(self) -> dict[str, int]:
        """The length tags that verl keeps for each row."""
        return dict(zip(LENGTH_TAGS, (*self._lengths, self.length), strict=True))

    def fields(
        self, rows: Sequence[Row], leave_out: Collection[str] = (), n_pads: int = 1
    ) -> Columns:
        """Fields of ``n_pads`` pads, each shaped from the first of ``rows`` that has it; the others
        help find its kind.

        A field whose kind is unclear, or that cannot hold what its kind says, is refused with a
        PaddingDataError.
        """
        columns: Columns = {}
        for name in dict.fromkeys(name for row in rows for name in row if name not in leave_out):
            with_field = [row for row in rows if name in row]
            # If some rows hold None, the others say what kind of column it is.
            tensors = [row for row in with_field if isinstance(row[name], torch.Tensor)]
            with_field = tensors or with_field
            value = with_field[0][name]
            field = self._schema.format_of(name, with_field, self._lengths)
            length = field.kind.tokens(*self._lengths)
            if field.fill is Fill.ROUTES and tensors and length is not None and value.ndim == 3:
                n_experts = 1 + max(int(row[name].max()) for row in tensors)
                columns[name] = _routes(value, n_experts, n_pads, length)
            else:
                columns[name] = same_in_all(self._neutral(name, value, field, length), n_pads)
        return columns

    def _neutral(self, name: str, value: Any, field: FieldFormat, length: int | None) -> Any:
        if field.kind is Kind.MULTIMODAL and self._image is not None:
            return dict(self._image.inputs)
        if _shape(value) is None or field.kind in (Kind.OBJECT, Kind.MULTIMODAL):
            return empty_value(value)
        if field.kind is Kind.POSITIONS and length is not None:
            # Every axis of M-RoPE counts a text token alike.
            return torch.arange(length).to(value).expand(*value.shape[:-1], length).clone()
        shape = value.shape if length is None else (length, *value.shape[1:])
        values = value.new_full(shape, self._fills.get(field.fill, 0))
        if name in ("prompts", "input_ids") and self._image is not None:
            # The image's tokens end the prompt: all tokens before them are end-of-sequence.
            ids = torch.tensor(self._image.token_ids, dtype=values.dtype)
            prompt = self._lengths[0]
            values[prompt - len(ids) : prompt] = ids
        return values


def _routes(value: torch.Tensor, n_experts: int, n_pads: int, length: int) -> torch.Tensor:
    """(n_pads, length, layers, top-k) like a real row's ``value`` (tokens, layers, top-k): in each
    layer, the experts of a token lie evenly among the first ``n_experts``, and the next token has
    the next ones.

    With the experts up to the highest in the source rows, the pads of a batch keep these about
    equally busy, and a single pad those of all expert-parallel ranks. Each layer starts somewhere
    else. For 2 tokens, top-2 of 8 experts: layer 0 has (0, 4), (1, 5), layer 1 has (1, 5), (2, 6).
    """
    layers, top_k = value.shape[1:]
    n_experts = max(n_experts, top_k)
    token_layer = torch.arange(n_pads * length)[:, None] + torch.arange(layers)
    routes = token_layer[..., None] + n_experts // top_k * torch.arange(top_k)
    return (routes % n_experts).to(value).reshape(n_pads, length, layers, top_k)


def same_in_all(value: Any, n_rows: int) -> torch.Tensor | NonTensorStack:
    """A column of rows that all have this value."""
    if not isinstance(value, torch.Tensor):
        # Wrapped once: wrapping each anew would take most of the time of an upsample.
        return NonTensorStack(*[NonTensorData(value)] * n_rows)
    # Dense, though the real rows' columns are jagged: TransferQueue keeps rows one by one and packs
    # a call's rows anew, and a dense column goes in five times faster. Repeated, not expanded: one
    # scalar expanded to one row counts as contiguous with a stride of 0, which TransferQueue cannot
    # send.
    return value.repeat(n_rows, *[1] * value.ndim)


def empty_value(value: Any) -> Any:
    """The empty value of the type of ``value``; None if the type has none.

    Only the type, dtype and rank of ``value`` are kept: a source row's ground truth in a pad would
    be one more answer to a question nobody asked. Subclasses give the plain value (``{}`` for any
    mapping, ``()`` for a named tuple).

    >>> [empty_value(value) for value in (np.float32(0.5), b"abc", {"style": "rule"}, range(3))]
    [np.float32(0.0), b'', {}, None]
    """
    if isinstance(value, torch.Tensor):
        return value.new_zeros((0, *value.shape[1:]) if value.ndim else ())
    if isinstance(value, np.ndarray):
        return value[:0].copy() if value.ndim else None
    if isinstance(value, np.generic):
        # Before Python's types: np.float64 and np.str_ are subclasses of them.
        return np.zeros((), dtype=value.dtype)[()]
    if isinstance(value, Mapping):
        return {}
    return next((kind() for kind in EMPTY_OF_ITSELF if isinstance(value, kind)), None)
