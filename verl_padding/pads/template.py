"""One pad row, made from real rows, with their fields, dtypes and ranks, neutral values and no loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_padding.errors import PaddingDataError
from verl_padding.pads.neutral_values import empty_value, filled
from verl_padding.pads.roles import FieldRole, Fill, Role
from verl_padding.pads.routes import spread_routes
from verl_padding.pads.schema import Row, Schema
from verl_padding.pads.vision_families import SmallestImage

PAD_RESPONSE_LENGTH = 1


@dataclass(frozen=True)
class PadFields:
    """Fields of some pads."""

    shared: dict[str, Any] = field(default_factory=dict)
    """Fields that all of them share."""
    per_pad: dict[str, Any] = field(default_factory=dict)
    """One value per pad, along the first dimension."""


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
        self._eos_token_id = eos_token_id
        self._schema = schema or Schema()
        self._n_experts = n_experts
        self._image = image

    @property
    def tag_lengths(self) -> dict[str, int]:
        """The length tags that verl keeps for each row."""
        prompt = self.length - PAD_RESPONSE_LENGTH
        return {"prompt_len": prompt, "response_len": PAD_RESPONSE_LENGTH, "seq_len": self.length}

    def has_seen(self, names: Collection[str]) -> bool:
        """Whether pads have been made with these fields, in this job."""
        return self._schema.met.issuperset(names)

    def fields(self, rows: Sequence[Row], names: Sequence[str], n_pads: int = 1) -> PadFields:
        """Fields of ``n_pads`` pads, each shaped from the first of ``rows`` that has it; the others help find its role.

        Args:
            rows: real rows, each with ``prompts`` and ``responses``.
            names: which fields; each is in at least one of the rows.

        Raises:
            PaddingDataError: the role of a field is unclear, or the field cannot hold what its role says.
        """
        pads = PadFields()
        pad_lengths = (self.length - PAD_RESPONSE_LENGTH, PAD_RESPONSE_LENGTH)
        for name in names:
            telling = _most_informative(name, [row for row in rows if name in row])
            value, role = telling[0][name], self._schema.role_of(name, telling, pad_lengths)
            if role.fill is Fill.ROUTES and getattr(value, "ndim", 0) == 3:
                pads.per_pad[name] = self._routes(value, n_pads)
                made = pads.per_pad[name][0]
            else:
                made = pads.shared[name] = self._neutral(name, value, role)
            self._check(name, made, role)
            self._schema.met.add(name)
        return pads

    def _check(self, name: str, made: Any, field: FieldRole) -> None:
        """Refuses a wrong length where the pad is made, before a worker trips over it."""
        if not field.role.is_per_token:
            return
        tags = self.tag_lengths
        wanted = field.role.tokens(tags["prompt_len"], tags["response_len"])
        if field.role.tokens_of(made) != wanted:
            raise PaddingDataError(
                f"field {name!r}: a pad's {type(made).__name__} covers {field.role.tokens_of(made)} tokens instead "
                f"of {wanted} (role {field.role.value}, pad of {tags['prompt_len']} + {tags['response_len']} tokens). "
                f"Set padding.fields.{name} to the role that it has."
            )

    def _neutral(self, name: str, value: Any, field: FieldRole) -> Any:
        if field.role is Role.MULTIMODAL and self._image is not None:
            return dict(self._image.inputs)
        no_tensor = not isinstance(value, torch.Tensor | np.ndarray)
        if field.role in (Role.OBJECT, Role.MULTIMODAL) or (field.role is Role.ROW and no_tensor):
            return empty_value(value)
        fill = {Fill.EOS: self._eos_token_id, Fill.ONE: 1}.get(field.fill, 0)
        if field.role is Role.ROW:
            return filled(name, value, tuple(value.shape), fill)
        tags = self.tag_lengths
        length = field.role.tokens(tags["prompt_len"], tags["response_len"])
        if field.role is Role.POSITIONS and not no_tensor:
            # Every axis of M-RoPE counts a text token alike.
            positions = np.broadcast_to(np.arange(length), (*value.shape[:-1], length)).copy()
            return (
                positions.astype(value.dtype)
                if isinstance(value, np.ndarray)
                else torch.from_numpy(positions).to(value)
            )
        made = filled(name, value, (length, *np.shape(value)[1:]), fill)
        if name in ("prompts", "input_ids") and self._image is not None:
            # The image's tokens end the prompt: all tokens before them are end-of-sequence.
            ids = torch.tensor(self._image.token_ids, dtype=made.dtype)
            made[tags["prompt_len"] - len(ids) : tags["prompt_len"]] = ids
        return made

    def _routes(self, value: Any, n_pads: int) -> Any:
        """(n_pads, L, layers, top-k) of the dtype and kind of ``value``."""
        layers, top_k = value.shape[1:]
        n_experts = self._n_experts() or int(value.max()) + 1
        tokens = n_pads * self.length
        routes = spread_routes(tokens=tokens, layers=layers, top_k=top_k, n_experts=n_experts)
        routes = routes.reshape(n_pads, self.length, layers, top_k)
        return routes.astype(value.dtype) if isinstance(value, np.ndarray) else torch.from_numpy(routes).to(value.dtype)


def _most_informative(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows whose field holds a tensor, or else a list that is not empty; all rows if none holds either."""
    # If some rows hold None, or nothing yet, the others say what kind of column it is.
    tensors = [row for row in rows if isinstance(row[name], torch.Tensor | np.ndarray)]
    return tensors or [row for row in rows if isinstance(row[name], list | tuple) and row[name]] or rows
