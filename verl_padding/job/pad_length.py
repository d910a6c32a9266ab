"""How long a pad has to be: what the engines of a job make of a row's length."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.role_engine import RoleEngine


def pad_length(padding: PaddingConfig, engines: Iterable[RoleEngine], at_least: int = MIN_PAD_LENGTH) -> int:
    """Tokens of a pad.

    ``auto`` is the shortest length that no engine rounds up: a shorter pad would cost the same and count as less. An
    explicit length is checked by the same rule.

    Args:
        engines: of all roles of the job.
        at_least: tokens that a pad needs for what it shows the model.

    Raises:
        PaddingConfigError: an explicit length is too short, or an engine would round it up.
    """
    multiple = lcm(*(engine.row_multiple for engine in engines))
    shortest = -(-max(at_least, MIN_PAD_LENGTH) // multiple) * multiple
    if padding.pad_length == "auto":
        return shortest
    length = int(padding.pad_length)
    if length < shortest or length % multiple:
        fitting = -(-max(length, shortest) // multiple) * multiple
        raise PaddingConfigError(
            f"padding.pad_length={length}: the job's engines take rows in multiples of {multiple} tokens, and a pad "
            f"has at least {shortest}. Set padding.pad_length=auto, or {fitting}."
        )
    return length
