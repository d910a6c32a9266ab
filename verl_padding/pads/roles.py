"""What each field of a row means for a pad: how long it is there and what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from verl_padding.errors import PaddingDataError


class Role(Enum):
    """How a field's length follows the row."""

    PROMPT = "one value a prompt token"
    RESPONSE = "one value a response token"
    SEQUENCE = "one value a token of prompt and response"
    POSITIONS = "position ids, tokens last: (L,), (3, L) or (4, L)"
    ROW = "one value, of a fixed shape, a row"
    OBJECT = "not a tensor"


class Fill(Enum):
    """What a pad's tensor holds."""

    ZERO = 0
    ONE = 1
    EOS = "the tokenizer's end-of-sequence id"


@dataclass(frozen=True)
class FieldRole:
    role: Role
    fill: Fill = Fill.ZERO


KNOWN_FIELDS: Mapping[str, FieldRole] = {
    # written by verl's agent loop (trainer/ppo/v1/agent_loop_tq.py)
    "prompts": FieldRole(Role.PROMPT, Fill.EOS),
    "responses": FieldRole(Role.RESPONSE, Fill.EOS),
    "input_ids": FieldRole(Role.SEQUENCE, Fill.EOS),
    "attention_mask": FieldRole(Role.SEQUENCE, Fill.ONE),
    "position_ids": FieldRole(Role.POSITIONS),
    "response_mask": FieldRole(Role.RESPONSE),
    "loss_mask": FieldRole(Role.RESPONSE),
    "rm_scores": FieldRole(Role.RESPONSE),
    "rollout_log_probs": FieldRole(Role.RESPONSE),
    "routed_experts": FieldRole(Role.SEQUENCE),
    "teacher_ids": FieldRole(Role.SEQUENCE, Fill.EOS),
    "teacher_logprobs": FieldRole(Role.SEQUENCE),
    # written by verl's workers, whole sequence
    "log_probs": FieldRole(Role.SEQUENCE),
    # written by verl's trainer (trainer/ppo/v1/trainer_base.py), response only. Workers write `entropy` and
    # `values` for the whole sequence first; the trainer overwrites them before an update reads them.
    "old_log_probs": FieldRole(Role.RESPONSE),
    "ref_log_prob": FieldRole(Role.RESPONSE),
    "entropy": FieldRole(Role.RESPONSE),
    "values": FieldRole(Role.RESPONSE),
    "advantages": FieldRole(Role.RESPONSE),
    "returns": FieldRole(Role.RESPONSE),
    "token_level_rewards": FieldRole(Role.RESPONSE),
    "rollout_is_weights": FieldRole(Role.RESPONSE),
}


def role_of(name: str, rows: Sequence[Mapping[str, Any]]) -> FieldRole:
    """The role of field ``name``: from the table, else from its shapes in several real rows.

    Args:
        rows: real rows, each with ``prompts`` (P,) and ``responses`` (R,); rows of different lengths tell most.

    Raises:
        PaddingDataError: the lengths fit more than one role.
    """
    if name in KNOWN_FIELDS:
        return KNOWN_FIELDS[name]
    values = [row[name] for row in rows]
    if not isinstance(values[0], torch.Tensor | np.ndarray):
        return FieldRole(Role.OBJECT)
    if values[0].ndim == 0:
        return FieldRole(Role.ROW)
    fitting = [role for role in _TOKEN_ROLES if _follows(role, values, rows)]
    if len(fitting) == 1:
        return FieldRole(fitting[0])
    if not fitting and len({tuple(value.shape) for value in values}) == 1:
        return FieldRole(Role.ROW)
    raise PaddingDataError(
        f"field {name!r}: role unknown, shapes {[tuple(value.shape) for value in values]} in rows of "
        f"(prompt, response) lengths {[_lengths(row) for row in rows]}"
        + (f" fit {' and '.join(role.name for role in fitting)}." if fitting else " fit no role.")
        + " Give the field a length that follows the prompt, the response or the sequence, or none."
    )


_TOKEN_ROLES = (Role.PROMPT, Role.RESPONSE, Role.SEQUENCE)


def _lengths(row: Mapping[str, Any]) -> tuple[int, int]:
    return len(row["prompts"]), len(row["responses"])


def _follows(role: Role, values: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    for value, row in zip(values, rows, strict=True):
        prompt, response = _lengths(row)
        length = {Role.PROMPT: prompt, Role.RESPONSE: response, Role.SEQUENCE: prompt + response}[role]
        if value.shape[0] != length:
            return False
    return True
