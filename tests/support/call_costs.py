"""Costs of a call whose rows are known by their tokens alone."""

import numpy as np

from verl_padding.plan import COST_MODELS, Pass
from verl_padding.plan.call_costs import CallCosts


def costs_of(
    tokens,
    *,
    cost_model="attention",
    tries=None,
    **pass_fields,
):
    """With pads of two tokens."""
    return CallCosts(
        call=Pass(**pass_fields),
        tokens_R=np.array(tokens, dtype=np.int64),
        cost_model=COST_MODELS[cost_model],
        pad_tokens=2,
        tries=tries,
    )
