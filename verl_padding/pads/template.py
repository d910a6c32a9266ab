"""Pads, made from real rows: what each field means for a pad, and a neutral value of its dtype and
rank."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from verl_padding.errors import PaddingDataError
from verl_padding.pads.roles import FOUND_BY_LENGTH, KNOWN_FIELDS, FieldRole, Fill, Role
from verl_padding.pads.tags import LENGTH_TAGS
from verl_padding.pads.vision_families import SmallestImage

PAD_RESPONSE_LENGTH = 1
GOLDEN = 0.618
"""Step from one expert to the next, as a share of their number: the first few are then always far
apart."""
EMPTY_OF_ITSELF = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset)
Row = Mapping[str, Any]
"""Fields of a row by name; ``prompts`` (P,) and ``responses`` (R,) among them."""
Columns = dict[str, torch.Tensor | NonTensorStack]
"""Field -> its values in some rows, one a row."""


class Schema:
    """Field name -> role, for one job: a role that was found once is kept as long as later rows
    agree.

    A batch may be a single row, whose lengths say little; earlier batches have said more. Roles
    that are ``declared`` in ``padding.fields`` come before all else.
    """

    def __init__(self, declared: Mapping[str, FieldRole] | None = None):
        self._declared = declared or {}
        self._found: dict[str, FieldRole] = {}

    def role_of(self, name: str, rows: Sequence[Row], pad_lengths: tuple[int, int]) -> FieldRole:
        """The role of a field, declared, known, or found from its shapes in real rows of different
        lengths.

        Roles that give a pad the same length, of ``pad_lengths`` prompt and response tokens, need
        no choice. Where no role fits, or several do and nothing says which, this raises a
        PaddingDataError.
        """
        values = [row[name] for row in rows]
        if (declared := self._declared.get(name)) is not None:
            if not _fits(declared.role, values, rows):
                raise _unclear(
                    name, rows, f"are not those of its declared role, {declared.role.value}."
                )
            return declared
        known = KNOWN_FIELDS.get(name) or self._found.get(name)
        if known is not None and _fits(known.role, values, rows):
            return known
        fitting, fill = _roles_that_fit(values, rows), known.fill if known else Fill.ZERO
        # In rows of 4 + 4 tokens, a field of 4 is of prompts or of responses. A pad of 1 + 1 has
        # one value in either case.
        pad_sizes = {
            values[0].shape[0] if role is Role.ROW else role.tokens(*pad_lengths)
            for role in (fitting if len(fitting) > 1 else [])
        }
        if not fitting or len(pad_sizes) > 1:
            named = " and ".join(role.value for role in fitting)
            raise _unclear(name, rows, f"fit {named or 'no role'}.")
        field = FieldRole(fitting[0], fill)
        # Not kept: one of several, since later rows may say more and other pads be longer; nor an
        # object, which fits anything: a field that was None so far may yet hold tensors.
        if len(fitting) == 1 and field.role is not Role.OBJECT:
            self._found[name] = field
        return field


def _unclear(name: str, rows: Sequence[Row], what: str) -> PaddingDataError:
    return PaddingDataError(
        f"field {name!r}: its role is unclear. Its shapes {[_shape(row[name]) for row in rows]} "
        f"in rows of (prompt, response) lengths {[_lengths(row) for row in rows]} {what} Set its "
        f"role, in a job by +padding.fields.{name}=response (or prompt, sequence, row, object), "
        f"in a call of upsample by roles={{{name!r}: FieldRole(Role.RESPONSE)}}, or do not put it "
        "into the rows."
    )


def _roles_that_fit(values: Sequence[Any], rows: Sequence[Row]) -> list[Role]:
    if not _is_array(values[0]):
        return [Role.OBJECT]
    if values[0].ndim == 0:
        return [Role.ROW]
    fitting = [role for role in FOUND_BY_LENGTH if _fits(role, values, rows)]
    # If a length follows the tokens of rows of different lengths, it is no accident; if it never
    # changes, it may be.
    if _fits(Role.ROW, values, rows) and (len(rows) > 1 or not fitting):
        fitting.append(Role.ROW)
    return fitting


def _fits(role: Role, values: Sequence[Any], rows: Sequence[Row]) -> bool:
    shapes = [_shape(value) for value in values]
    if role in (Role.OBJECT, Role.MULTIMODAL):
        return True
    if role is Role.ROW:
        return len(set(shapes)) == 1
    axis = -1 if role is Role.POSITIONS else 0
    return all(
        s and s[axis] == role.tokens(*_lengths(row)) for s, row in zip(shapes, rows, strict=True)
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _shape(value: Any) -> tuple[int, ...] | None:
    if _is_array(value):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else None


def _lengths(row: Row) -> tuple[int, int]:
    return len(row["prompts"]), len(row["responses"])


def shortest_pad(image: SmallestImage | None) -> int:
    """Tokens of a pad that has a response, and a prompt of at least one token, with the image at
    its end."""
    return max(1, len(image.token_ids) if image else 0) + PAD_RESPONSE_LENGTH


class PadTemplate:
    """Makes the fields of pads from those of real rows.

    A pad has ``length - 1`` prompt tokens and one response token, all end-of-sequence except those
    of an image, and masks of zero. From a row of 5 prompt and 3 response tokens, with ``length=4``:
    ``input_ids`` (8,) -> (4,), ``rm_scores`` (3,) -> (1,), ``position_ids`` (3, 8) -> (3, 4),
    ``teacher_ids`` (8, 20) -> (4, 20).

    Args:
        length: tokens of a pad.
        n_experts: returns the number of routed experts of a layer, None if not known; called only
            if needed.
        image: what pads show the model's vision tower; None for nothing.
    """

    def __init__(
        self,
        *,
        eos_token_id: int,
        length: int,
        schema: Schema | None = None,
        n_experts: Callable[[], int | None] = lambda: None,
        image: SmallestImage | None = None,
    ):
        if length < (shortest := shortest_pad(image)):
            why = "its prompt has at least one token, or those of the smallest image of the model"
            raise PaddingDataError(
                f"length={length}: a pad here has at least {shortest}: {why}. Give {shortest}."
            )
        self.length = length
        self._lengths = (length - PAD_RESPONSE_LENGTH, PAD_RESPONSE_LENGTH)
        self._eos_token_id = eos_token_id
        self._schema = schema or Schema()
        self._n_experts = n_experts
        self._image = image

    @property
    def tag_lengths(self) -> dict[str, int]:
        """The length tags that verl keeps for each row."""
        return dict(zip(LENGTH_TAGS, (*self._lengths, self.length), strict=True))

    def fields(
        self, rows: Sequence[Row], names: Collection[str] | None = None, n_pads: int = 1
    ) -> Columns:
        """Fields of ``n_pads`` pads, each shaped from the first of ``rows`` that has it; the others
        help find its role.

        ``names`` are those of some fields of the rows, None for all. A field whose role is unclear,
        or that cannot hold what its role says, is refused with a PaddingDataError.
        """
        columns: Columns = {}
        for name in dict.fromkeys(name for row in rows for name in row) if names is None else names:
            with_field = _most_informative(name, [row for row in rows if name in row])
            value = with_field[0][name]
            field = self._schema.role_of(name, with_field, self._lengths)
            length = field.role.tokens(*self._lengths)
            if field.fill is Fill.ROUTES and length is not None and getattr(value, "ndim", 0) == 3:
                columns[name] = self._routes(value, n_pads, length)
            else:
                columns[name] = same_in_all(self._neutral(name, value, field, length), n_pads)
        return columns

    def _neutral(self, name: str, value: Any, field: FieldRole, length: int | None) -> Any:
        if field.role is Role.MULTIMODAL and self._image is not None:
            return dict(self._image.inputs)
        is_object = field.role in (Role.OBJECT, Role.MULTIMODAL)
        if is_object or (field.role is Role.ROW and not _is_array(value)):
            return empty_value(value)
        if field.role is Role.POSITIONS and length is not None and _is_array(value):
            # Every axis of M-RoPE counts a text token alike.
            shape = (*value.shape[:-1], length)
            return _like(value, np.broadcast_to(np.arange(length), shape).copy())
        shape = np.shape(value) if length is None else (length, *np.shape(value)[1:])
        fill = {Fill.EOS: self._eos_token_id, Fill.ONE: 1}.get(field.fill, 0)
        made = _filled(name, value, shape, fill)
        if name in ("prompts", "input_ids") and self._image is not None:
            # The image's tokens end the prompt: all tokens before them are end-of-sequence.
            ids = torch.tensor(self._image.token_ids, dtype=made.dtype)
            prompt = self._lengths[0]
            made[prompt - len(ids) : prompt] = ids
        return made

    def _routes(self, value: Any, n_pads: int, length: int) -> Any:
        """(n_pads, length, layers, top-k): in each layer, all experts come equally often, give or
        take once.

        The experts are walked in steps that share no divisor with their number, so that every
        expert comes once per round, and those of a few pads lie far apart, on different
        expert-parallel ranks. Each layer starts somewhere else. For 2 tokens, top-2 of 8 experts,
        in steps of 5: layer 0 has (0, 5), (2, 7), layer 1 has (5, 2), (7, 4).
        """
        layers, top_k = value.shape[1:]
        known = self._n_experts()
        n_experts = int(value.max()) + 1 if known is None else known
        if top_k > n_experts:
            raise PaddingDataError(
                f"field 'routed_experts': {top_k} experts per token, but the model has "
                f"{n_experts}. Is actor_rollout_ref.model.path (or n_experts) that of the model "
                "that the rows come from?"
            )
        # Of 8 experts, 0.618 * 8 is 5, which has no divisor in common with 8.
        steps = range(max(1, round(GOLDEN * n_experts)), n_experts + 1)
        step = next(step for step in steps if gcd(step, n_experts) == 1)
        token, layer, slot = np.ogrid[: n_pads * length, :layers, :top_k]
        routes = (token * top_k + layer + slot) * step % n_experts
        made = _like(value, routes.reshape(n_pads, length, layers, top_k))
        return made if isinstance(made, torch.Tensor) else NonTensorStack(*made)


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
        return np.zeros((0, *value.shape[1:]) if value.ndim else (), dtype=value.dtype)
    if isinstance(value, np.generic):
        # Before Python's types: np.float64 and np.str_ are subclasses of them.
        return np.zeros((), dtype=value.dtype)[()]
    if isinstance(value, Mapping):
        return {}
    return next((kind() for kind in EMPTY_OF_ITSELF if isinstance(value, kind)), None)


def _filled(name: str, value: Any, shape: tuple[int, ...], fill: int) -> Any:
    """A tensor, an array or a list of numbers like ``value``, of another shape, that holds ``fill``
    everywhere."""
    if isinstance(value, torch.Tensor):
        return value.new_full(shape, fill)
    if isinstance(value, np.ndarray):
        if fill:
            return np.full(shape, fill, dtype=value.dtype)
        return np.zeros(shape, dtype=value.dtype) if value.dtype != object else np.full(shape, None)
    if isinstance(value, list | tuple):
        first = value[0] if value else 0.0
        if isinstance(first, bool | int | float | complex | np.number | np.bool_):
            return type(value)([type(first)(fill)] * shape[0])
    raise PaddingDataError(
        f"field {name!r}: a {type(value).__name__} cannot hold one value per token, unless it "
        f"lists numbers. Set padding.fields.{name}=object (in a call of upsample, "
        f"roles={{{name!r}: FieldRole(Role.OBJECT)}}), or store it as a tensor or an array."
    )


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as the kind and in the dtype of ``value``."""
    return (
        array.astype(value.dtype)
        if isinstance(value, np.ndarray)
        else torch.from_numpy(array).to(value)
    )


def _most_informative(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows whose field holds a tensor, or else a list that is not empty; all rows if none holds
    either."""
    # If some rows hold None, or nothing yet, the others say what kind of column it is.
    tensors = [row for row in rows if _is_array(row[name])]
    return (
        tensors
        or [row for row in rows if isinstance(row[name], list | tuple) and row[name]]
        or rows
    )
