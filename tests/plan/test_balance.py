"""Balance over the ranks and even groups of prompts, against trying everything; and the examples in
docstrings."""

import doctest
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.plan.mini_batches import even_groups
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


@settings(max_examples=300)
@given(rows_P=st.lists(st.integers(1, 40), min_size=1, max_size=60), n_groups=st.integers(1, 12))
def test_groups_of_prompts_keep_both_bounds(rows_P, n_groups):
    n_groups = min(n_groups, len(rows_P))
    groups = even_groups(rows_P, n_groups)
    assert sorted(prompt for group in groups for prompt in group) == list(range(len(rows_P)))
    sizes, rows_G = (
        [len(group) for group in groups],
        [sum(rows_P[prompt] for prompt in group) for group in groups],
    )
    assert max(sizes) - min(sizes) <= 1
    assert max(rows_G) - min(rows_G) <= max(rows_P)


def test_prompts_leave_their_order_only_to_even_out_the_rows():
    # In order: 1 + 1 against 9 + 9 rows. No prompt may change sides alone, so a small one is
    # swapped for a large one.
    assert even_groups([1, 1, 9, 9], 2) == [[1, 2], [0, 3]]


@pytest.mark.parametrize(
    "module", ["planner", "rows", "mini_batches", "row_keys", "plural", "strategies.lcm"]
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"verl_padding.plan.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
