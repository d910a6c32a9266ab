"""What each field of a row means for a pad: known by name, declared by the user, or seen in real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_padding.errors import PaddingDataError
from verl_padding.pads.roles import FOUND_BY_LENGTH, KNOWN_FIELDS, FieldRole, Fill, Role

Row = Mapping[str, Any]
"""Fields of a row by name; ``prompts`` (P,) and ``responses`` (R,) among them."""


class Schema:
    """Field name -> role, for one job: a role that was found once is kept as long as later rows agree.

    A batch may be a single row, whose lengths say little; earlier batches have said more.

    Args:
        declared: roles from ``padding.fields``, which come before all else.
    """

    def __init__(self, declared: Mapping[str, FieldRole] | None = None):
        self._declared = dict(declared or {})
        self._found: dict[str, FieldRole] = {}
        self.seen: set[str] = set()
        """Fields that a pad has been made with."""

    def role_of(self, name: str, rows: Sequence[Row], pad_lengths: tuple[int, int]) -> FieldRole:
        """The role of a field, from the table or from its shapes in real rows that all have it.

        Args:
            rows: real rows; rows of different lengths say most.
            pad_lengths: prompt and response tokens of a pad. Roles that give a pad the same length need no choice.

        Raises:
            PaddingDataError: no role fits, or several do and nothing says which.
        """
        values = [row[name] for row in rows]
        if name in self._declared:
            field = self._declared[name]
            if not _fits(field.role, values, rows):
                raise self._unclear(name, rows, f"are not those of padding.fields.{name}={field.role.value}.")
            return field
        known = KNOWN_FIELDS.get(name) or self._found.get(name)
        if known is not None and _fits(known.role, values, rows):
            return known
        fitting, fill = _roles_that_fit(values, rows), known.fill if known else Fill.ZERO
        if len(fitting) > 1 and len({_length_in_a_pad(role, values[0], pad_lengths) for role in fitting}) == 1:
            return FieldRole(fitting[0], fill)  # not kept: later rows may say more, and other pads be longer
        if len(fitting) != 1:
            fit = f"fit {' and '.join(role.value for role in fitting)}" if fitting else "fit no role"
            raise self._unclear(name, rows, f"{fit}.")
        field = FieldRole(fitting[0], fill)
        if field.role is not Role.OBJECT:  # which fits anything: a field that was None so far may yet hold tensors
            self._found[name] = field
        return field

    def _unclear(self, name: str, rows: Sequence[Row], what: str) -> PaddingDataError:
        shapes = [_shape(row[name]) for row in rows]
        return PaddingDataError(
            f"field {name!r}: its role is unclear. Its shapes {shapes} in rows of (prompt, response) lengths "
            f"{[_lengths(row) for row in rows]} {what} Set its role on the command line, "
            f"+padding.fields.{name}=response (or prompt, sequence, row, object), or do not put it into the rows."
        )


def _roles_that_fit(values: Sequence[Any], rows: Sequence[Row]) -> list[Role]:
    if not isinstance(values[0], torch.Tensor | np.ndarray):
        return [Role.OBJECT]
    if values[0].ndim == 0:
        return [Role.ROW]
    fitting = [role for role in FOUND_BY_LENGTH if _fits(role, values, rows)]
    # If a length follows the tokens of rows of different lengths, it is no accident; if it never changes, it may be.
    same_shape = len({_shape(value) for value in values}) == 1
    if same_shape and (len(rows) > 1 or not fitting):
        fitting.append(Role.ROW)
    return fitting


def _fits(role: Role, values: Sequence[Any], rows: Sequence[Row]) -> bool:
    if role is Role.ROW:
        return len({_shape(value) for value in values}) == 1
    if not role.is_per_token:
        return True
    return all(role.tokens_of(value) == role.tokens(*_lengths(row)) for value, row in zip(values, rows, strict=True))


def _length_in_a_pad(role: Role, value: Any, pad_lengths: tuple[int, int]) -> int:
    return int(value.shape[0]) if role is Role.ROW else role.tokens(*pad_lengths)


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else None


def _lengths(row: Row) -> tuple[int, int]:
    return len(row["prompts"]), len(row["responses"])
