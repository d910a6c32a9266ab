"""One pad row, made from real rows: same fields, dtypes and ranks, neutral values, no loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_padding.errors import PaddingDataError
from verl_padding.pads.roles import FieldRole, Fill, Role, role_of

PAD_RESPONSE_LENGTH = 1


class PadTemplate:
    """Makes the fields of a pad from those of real rows.

    A pad has ``pad_length - 1`` prompt tokens and one response token, all end-of-sequence, and masks of zero.

    Example:
        A source row of 5 prompt and 3 response tokens, ``pad_length=4``: ``input_ids`` (8,) -> (4,),
        ``rm_scores`` (3,) -> (1,), ``position_ids`` (3, 8) -> (3, 4), ``teacher_ids`` (8, 20) -> (4, 20).
    """

    def __init__(self, *, eos_token_id: int, pad_length: int):
        self._eos_token_id = eos_token_id
        self._lengths = {
            Role.PROMPT: pad_length - PAD_RESPONSE_LENGTH,
            Role.RESPONSE: PAD_RESPONSE_LENGTH,
            Role.SEQUENCE: pad_length,
            Role.POSITIONS: pad_length,
        }

    @property
    def tag_lengths(self) -> dict[str, int]:
        """The length tags that verl keeps for each row."""
        return {
            "prompt_len": self._lengths[Role.PROMPT],
            "response_len": self._lengths[Role.RESPONSE],
            "seq_len": self._lengths[Role.SEQUENCE],
        }

    def fields(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        """A pad's fields ``names``, shaped from ``rows[0]``; the other rows help to tell what a field means.

        Raises:
            PaddingDataError: a field whose role is unknown, or whose type has no neutral value.
        """
        return {name: self._neutral(name, rows[0][name], role_of(name, rows)) for name in names}

    def _neutral(self, name: str, value: Any, field: FieldRole) -> Any:
        if field.role is Role.OBJECT:
            return _neutral_object(name, value)
        fill = self._eos_token_id if field.fill is Fill.EOS else field.fill.value
        if field.role is Role.ROW:
            return _full_like(value, tuple(value.shape), fill)
        length = self._lengths[field.role]
        if field.role is Role.POSITIONS:
            # Every axis of M-RoPE counts a text token alike.
            positions = torch.arange(length, dtype=value.dtype, device=value.device)
            return positions.expand(*value.shape[:-1], length).clone()
        return _full_like(value, (length, *value.shape[1:]), fill)


def _full_like(value: Any, shape: tuple[int, ...], fill: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.full(shape, fill, dtype=value.dtype)
    return value.new_full(shape, fill)


def _neutral_object(name: str, value: Any) -> Any:
    # Nothing of the source row: its ground truth in a pad would be one more answer to a question nobody asked.
    if value is None:
        return None
    for kind in (bool, int, float, str, list, tuple, dict):
        if isinstance(value, kind):
            return kind()
    raise PaddingDataError(
        f"field {name!r}: a {type(value).__name__} has no neutral value for a pad. Store it as a tensor, a NumPy "
        "array or a plain bool, int, float, str, list, tuple, dict or None."
    )
