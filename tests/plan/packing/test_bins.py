"""Balance over bins of a limited number of items."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.plan.packing.bins import balance


@settings(max_examples=200)
@given(
    costs=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    n_bins=st.integers(1, 8),
    spare=st.integers(0, 3),
)
def test_every_item_is_in_one_bin_and_none_overflows_or_is_empty(costs, n_bins, spare):
    most = -(-len(costs) // n_bins) + spare
    bins = balance(np.array(costs, dtype=np.int64), n_bins, most)
    assert sorted(item for items in bins for item in items) == list(range(len(costs)))
    assert max(map(len, bins)) <= most
    assert sum(map(bool, bins)) == min(n_bins, len(costs))
