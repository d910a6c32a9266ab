"""Costs of a call whose rows are known by their tokens alone."""

from collections.abc import Sequence

import numpy as np

from verl_padding.plan import COST_MODELS, Pass
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.prefix_tries import PrefixTries


def costs_of(
    tokens: Sequence[int],
    *,
    cost_model: str = "attention",
    tries: PrefixTries | None = None,
    **of_call,
) -> CallCosts:
    """With pads of two tokens."""
    return CallCosts(
        call=Pass(**of_call),
        tokens_R=np.array(tokens, dtype=np.int64),
        cost_model=COST_MODELS[cost_model],
        pad_tokens=2,
        tries=tries,
    )
