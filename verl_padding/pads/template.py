"""One pad row, made from real rows, with their fields, dtypes and ranks, neutral values and no loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from verl_padding.errors import PaddingDataError
from verl_padding.pads.neutral_values import empty_value, filled, spread_routes
from verl_padding.pads.roles import FieldRole, Fill, Role
from verl_padding.pads.schema import Row, Schema
from verl_padding.pads.tags import LENGTH_TAGS
from verl_padding.pads.vision_families import SmallestImage

PAD_RESPONSE_LENGTH = 1

Columns = dict[str, torch.Tensor | NonTensorStack]
"""Field -> its values in some rows, one a row."""


class PadTemplate:
    """Makes the fields of pads from those of real rows.

    A pad has ``length - 1`` prompt tokens and one response token, all end-of-sequence except those of an image, and
    masks of zero.

    Example:
        A source row of 5 prompt and 3 response tokens, ``length=4``: ``input_ids`` (8,) -> (4,), ``rm_scores`` (3,) ->
        (1,), ``position_ids`` (3, 8) -> (3, 4), ``teacher_ids`` (8, 20) -> (4, 20).

    Args:
        eos_token_id: the tokenizer's end-of-sequence id.
        length: tokens of a pad.
        schema: the roles of fields.
        n_experts: returns the number of routed experts of a layer, None if not known; called only if needed.
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
        if image is not None and len(image.token_ids) > length - PAD_RESPONSE_LENGTH:
            raise PaddingDataError(
                f"padding.pad_length={length}: the smallest image of this model takes {len(image.token_ids)} tokens "
                "of a prompt. Set padding.pad_length=auto, or to at least "
                f"{len(image.token_ids) + PAD_RESPONSE_LENGTH}."
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

    def has_seen(self, names: Collection[str]) -> bool:
        """Whether pads have been made with these fields, in this job."""
        return self._schema.seen.issuperset(names)

    def fields(self, rows: Sequence[Row], names: Sequence[str], n_pads: int = 1) -> Columns:
        """Fields of ``n_pads`` pads, each shaped from the first of ``rows`` that has it; the others help find its role.

        Args:
            rows: real rows, each with ``prompts`` and ``responses``.
            names: which fields; each is in at least one of the rows.

        Raises:
            PaddingDataError: the role of a field is unclear, or the field cannot hold what its role says.
        """
        columns: Columns = {}
        for name in names:
            with_field = _most_informative(name, [row for row in rows if name in row])
            value, field = with_field[0][name], self._schema.role_of(name, with_field, self._lengths)
            if field.fill is Fill.ROUTES and field.role.is_per_token and getattr(value, "ndim", 0) == 3:
                columns[name] = self._routes(value, n_pads, field.role.tokens(*self._lengths))
            else:
                columns[name] = same_in_all(self._neutral(name, value, field), n_pads)
            self._schema.seen.add(name)
        return columns

    def _neutral(self, name: str, value: Any, field: FieldRole) -> Any:
        if field.role is Role.MULTIMODAL and self._image is not None:
            return dict(self._image.inputs)
        no_tensor = not isinstance(value, torch.Tensor | np.ndarray)
        if field.role in (Role.OBJECT, Role.MULTIMODAL) or (field.role is Role.ROW and no_tensor):
            return empty_value(value)
        fill = {Fill.EOS: self._eos_token_id, Fill.ONE: 1}.get(field.fill, 0)
        if field.role is Role.ROW:
            return filled(name, value, tuple(value.shape), fill)
        length = field.role.tokens(*self._lengths)
        if field.role is Role.POSITIONS and not no_tensor:
            # Every axis of M-RoPE counts a text token alike.
            positions = np.broadcast_to(np.arange(length), (*value.shape[:-1], length)).copy()
            return _like(value, positions)
        made = filled(name, value, (length, *np.shape(value)[1:]), fill)
        if name in ("prompts", "input_ids") and self._image is not None:
            # The image's tokens end the prompt: all tokens before them are end-of-sequence.
            ids = torch.tensor(self._image.token_ids, dtype=made.dtype)
            prompt = self._lengths[0]
            made[prompt - len(ids) : prompt] = ids
        return made

    def _routes(self, value: Any, n_pads: int, length: int) -> Any:
        """(n_pads, length, layers, top-k)."""
        layers, top_k = value.shape[1:]
        n_experts = self._n_experts() or int(value.max()) + 1
        routes = spread_routes(tokens=n_pads * length, layers=layers, top_k=top_k, n_experts=n_experts)
        made = _like(value, routes.reshape(n_pads, length, layers, top_k))
        return made if isinstance(made, torch.Tensor) else NonTensorStack(*made)


def same_in_all(value: Any, n_rows: int) -> torch.Tensor | NonTensorStack:
    """A column of rows that all have this value."""
    if not isinstance(value, torch.Tensor):
        # Wrapped once: left to the stack, wrapping each anew would take most of the time of an upsample.
        return NonTensorStack(*[NonTensorData(value)] * n_rows)
    # Dense, though the real rows' columns are jagged: TransferQueue keeps rows one by one and packs a call's rows anew,
    # and a dense column goes in five times faster. Repeated, not expanded: one scalar expanded to one row counts as
    # contiguous with a stride of 0, which TransferQueue cannot send.
    return value.repeat(n_rows, *[1] * value.ndim)


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as the kind and in the dtype of ``value``."""
    return array.astype(value.dtype) if isinstance(value, np.ndarray) else torch.from_numpy(array).to(value)


def _most_informative(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows whose field holds a tensor, or else a list that is not empty; all rows if none holds either."""
    # If some rows hold None, or nothing yet, the others say what kind of column it is.
    tensors = [row for row in rows if isinstance(row[name], torch.Tensor | np.ndarray)]
    return tensors or [row for row in rows if isinstance(row[name], list | tuple) and row[name]] or rows
