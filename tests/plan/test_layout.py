"""A layout whose rows, pads and order are known."""

from tests.support.plan_oracles import layout_of_local_batches


def test_the_order_deals_rank_by_rank_and_mini_batch_by_mini_batch():
    # Two mini-batches, two ranks, local mini-batches of two rows and of one. Row 5 is pad 0 of 5
    # rows.
    layout = layout_of_local_batches(5, (((0, 1), (2, 5)), ((3,), (4,))))
    assert layout.order == (0, 1, 3, 2, 5, 4)
    assert layout.local_batch_rows_M == (2, 1)
    assert layout.real_rows_M == (3, 2)
    assert layout.n_pads == 1
