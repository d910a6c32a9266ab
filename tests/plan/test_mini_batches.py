"""Even groups of prompts."""

from verl_padding.plan.mini_batches import even_groups


def test_prompts_leave_their_order_only_to_even_out_the_rows():
    # In order: 1 + 1 against 9 + 9 rows. No prompt may change sides alone, so a small one is
    # swapped for a large one.
    assert even_groups([1, 1, 9, 9], 2) == [[1, 2], [0, 3]]
