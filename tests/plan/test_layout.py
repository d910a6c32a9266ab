"""Layouts whose rows, pads and orders are known."""

from tests.support.plan_oracles import layout_of_local_batches
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch


def test_the_order_deals_rank_by_rank_and_mini_batch_by_mini_batch():
    # Two mini-batches, two ranks, local mini-batches of two rows and of one. Row 5 is pad 0 of 5
    # rows.
    layout = layout_of_local_batches(5, (((0, 1), (2, 5)), ((3,), (4,))))
    assert layout.order == (0, 1, 3, 2, 5, 4)
    assert layout.local_batch_rows_M == (2, 1)
    assert layout.real_rows_M == (3, 2)
    assert layout.n_pads == 1


def test_a_pass_has_the_updates_micro_batches_and_then_other_rows():
    shape = {"dp_size": 2, "token_budget": 4, "sync_point": "mini_batch"}
    actor = Update(**shape, prompts_per_mini_batch=1, drops_zero_advantage=True)
    job = Job(
        strategy="prompt",
        prompts=2,
        sessions_per_prompt=3,
        updates={"actor": actor},
        inference={"log_prob": Pass(**shape, as_update="actor")},
        packer="plan",
    )
    keys = ["a_0_0", "a_1_0", "a_2_0", "b_0_0", "b_1_0", "b_2_0"]
    plan = plan_batch(Rows.from_keys(keys, [2] * 6, zero_advantage=(4, 5)), job)
    assert plan.layouts["actor"].rows_MDK == ((((0, 2),), ((1, 6),)), (((3,),), ((7,),)))
    taken = plan.layouts["log_prob"]
    assert taken.rows_MDK == ((((0, 2), (3,), (4,)), ((1, 6), (7,), (5,))),)
    assert (taken.n_pads, taken.dropped) == (2, ())
