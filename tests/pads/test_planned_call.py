"""What an optimizer step is told of its mini-batch."""

from verl_padding.pads.planned_call import MiniBatch, mini_batches
from verl_padding.plan import Layout


def test_a_mini_batch_counts_what_all_ranks_train_and_what_is_left_out():
    # Of real rows 0 to 3 and pad 4; row 3 is left out, and row 2 has no token.
    layout = Layout(n_rows=4, rows_MDK=((((0, 1),), ((2, 4),)),), cut_by="verl", dropped=((3,),))
    trained_R, tokens_R = [2, 0, 0, 5], [3, 1, 0, 6]
    counts = {"trained_tokens": 2, "trained_rows": 1, "reporting_ranks": 1}
    held = {"local_batches": ((0, 1), (2, 4))} | counts
    told = MiniBatch(**held, rows_with_loss=3, all_loss_tokens=10)
    assert mini_batches(layout, trained_R, tokens_R, drops_rows=True) == [told]
    assert mini_batches(layout, trained_R, tokens_R, divides_by_rows=False) == [
        MiniBatch(**held, rows_with_loss=None)
    ]
