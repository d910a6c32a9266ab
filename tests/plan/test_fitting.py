"""Cuts that are made to fit cells of a given size."""

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.calls import Pass
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.packing.fitting import Cut, fit


def test_a_cut_with_more_micro_batches_than_a_cell_has_rows_does_not_fit():
    costs = CallCosts(
        call=Pass(dp_size=1, token_budget=100),
        tokens_R=np.array([50, 50], dtype=np.int64),
        cost_model=attention_cost,
        pad_tokens=2,
    )
    cut = Cut(rows_DK=[[[0], [1], []]], time=0)
    assert fit(costs, cut, size=2) is None
    fitted = fit(costs, cut, size=3)
    assert fitted is not None
    assert (fitted.rows_DK, fitted.pads_DK) == ([[[0], [1], []]], [[0, 0, 1]])
