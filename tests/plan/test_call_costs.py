"""What is computed of rows, and what it costs."""

import numpy as np

from tests.support.call_costs import costs_of
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.prefix_tries import PrefixTries


def test_segments_cost_what_an_engine_rounds_them_up_to():
    # Rows of 20 and 17 tokens share 15: of the second, three are computed, and two more than rows
    # alone would have.
    tries = PrefixTries.in_order([20, 17], [0, 1], [0, 15])
    costs = costs_of([20, 17], tries=tries, dp_size=1, token_budget=64, token_multiple=5)
    tokens_DK, used_DK, load_DK = costs.micro_batch_loads([[[0, 1]]])
    assert tokens_DK.tolist() == [[20 + 3]]
    first, longer, before = attention_cost(np.array([20, 19, 14])).tolist()
    assert load_DK.tolist() == [[first + longer - before]]
    assert used_DK.tolist() == [[25]]
