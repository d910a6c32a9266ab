"""Even groups of prompts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.plan.mini_batches import even_groups


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
