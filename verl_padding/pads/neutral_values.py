"""Values without content, in the type of a value of a real row."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_padding.errors import PaddingDataError

GOLDEN = 0.618
"""Step from one expert to the next, as a share of their number: the first few are then always far apart."""
EMPTY_OF_ITSELF = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset)
"""Types that give their empty value when called without an argument."""


def empty_value(value: Any) -> Any:
    """The empty value of the type of ``value``; None if the type has none.

    Only the type, dtype and rank of ``value`` are kept: a source row's ground truth in a pad would be one more answer
    to a question nobody asked. Subclasses give the plain value (``{}`` for any mapping, ``()`` for a named tuple).

    >>> empty_value(np.float32(0.5)), empty_value(b"abc"), empty_value({"style": "rule"}), empty_value(range(3))
    (np.float32(0.0), b'', {}, None)
    """
    if isinstance(value, torch.Tensor):
        return torch.zeros((0, *value.shape[1:]) if value.ndim else (), dtype=value.dtype, device=value.device)
    if isinstance(value, np.ndarray):
        return np.zeros((0, *value.shape[1:]) if value.ndim else (), dtype=value.dtype)
    if isinstance(value, np.generic):
        # Before Python's types: np.float64 and np.str_ are subclasses of them.
        return np.zeros((), dtype=value.dtype)[()]
    if isinstance(value, Mapping):
        return {}
    for kind in EMPTY_OF_ITSELF:
        if isinstance(value, kind):
            return kind()
    return None


def filled(name: str, value: Any, shape: tuple[int, ...], fill: int) -> Any:
    """A tensor, an array or a list like ``value``, of another shape, that holds ``fill`` everywhere.

    Raises:
        PaddingDataError: ``value`` is not a tensor, array or list of numbers.
    """
    if isinstance(value, np.ndarray) and not fill:
        return np.zeros(shape, dtype=value.dtype) if value.dtype != object else np.full(shape, None)
    if isinstance(value, np.ndarray):
        return np.full(shape, fill, dtype=value.dtype)
    if isinstance(value, torch.Tensor):
        return torch.full(shape, fill, dtype=value.dtype, device=value.device)
    if isinstance(value, list | tuple):
        first = value[0] if value else 0.0
        if isinstance(first, bool | int | float | complex | np.number | np.bool_):
            return type(value)([type(first)(fill)] * shape[0])
    raise PaddingDataError(
        f"field {name!r}: a {type(value).__name__} cannot hold one value per token, unless it lists numbers. Set "
        f"padding.fields.{name}=object, or store it as a tensor or an array."
    )


def spread_routes(*, tokens: int, layers: int, top_k: int, n_experts: int) -> npt.NDArray[np.int64]:
    """Distinct experts for each token and layer; in each layer, all experts come equally often, give or take once.

    The experts are walked in steps that share no divisor with their number, so that every expert comes once per round,
    and those of a few pads lie far apart, on different expert-parallel ranks. Each layer starts somewhere else. For 2
    tokens, top-2 of 8 experts, in steps of 5: layer 0 has (0, 5), (2, 7), layer 1 has (5, 2), (7, 4).

    Returns:
        (tokens, layers, top_k), each below ``n_experts``.

    Raises:
        PaddingDataError: a token cannot have ``top_k`` distinct experts.
    """
    if top_k > n_experts:
        raise PaddingDataError(
            f"field 'routed_experts': {top_k} experts per token, but the model has {n_experts}. Is "
            "actor_rollout_ref.model.path the model that the rows come from?"
        )
    step = next(step for step in range(max(1, round(GOLDEN * n_experts)), n_experts + 1) if gcd(step, n_experts) == 1)
    token, layer, slot = np.ogrid[:tokens, :layers, :top_k]
    return (token * top_k + layer + slot) * step % n_experts
