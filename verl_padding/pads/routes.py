"""Routes of a pad's tokens through a mixture of experts."""

from __future__ import annotations

from math import gcd

import numpy as np
import numpy.typing as npt

from verl_padding.errors import PaddingDataError

GOLDEN = 0.618
"""Step from one expert to the next, as a share of their number: the first few are then always far apart."""


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
