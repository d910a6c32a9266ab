"""Small mini-batches whose local mini-batches and micro-batches are found by hand."""

import pytest

from tests.support.call_costs import costs_of
from verl_padding.plan.packing.local_mini_batches import (
    fixed_row_count,
    sync_per_step,
    whole_local_batches,
)


@pytest.mark.parametrize(
    ("cut", "tokens", "of_call", "rows_DK"),
    [
        # 6 + 1 and 5 + 2, the costlier one first.
        (fixed_row_count, [5, 2, 6, 1], {"dp_size": 1, "micro_batch_rows": 2}, [[[2, 3], [0, 1]]]),
        # 900 and two pads beside three rows of 300.
        (
            whole_local_batches,
            [900, 300, 300, 300],
            {"dp_size": 2, "token_budget": 1000},
            [[[0, 4, 4]], [[1, 2, 3]]],
        ),
        # 900 + 200 need two micro-batches, so 3 x 300 take two as well.
        (
            sync_per_step,
            [900, 300, 300, 300, 200],
            {"dp_size": 2, "token_budget": 1000, "sync_point": "mini_batch"},
            [[[0], [4, 5]], [[1, 3], [2]]],
        ),
    ],
)
def test_ranks_and_micro_batches_are_balanced_by_cost_and_filled_with_pads(
    cut, tokens, of_call, rows_DK
):
    """A pad is the number of the rows."""
    costs = costs_of(tokens, cost_model="tokens", **of_call)
    assert cut(costs, range(len(tokens)), None) == rows_DK
