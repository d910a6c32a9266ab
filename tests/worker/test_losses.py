"""What the wrapped loss hands on and reports; each of verl's losses in it is tested in
tests/equivalence."""

from tests.support.losses_on_rows import (
    PAD,
    Rows,
)
from verl_padding.worker.losses import MICRO_BATCHES, RealRowsLoss


def test_a_micro_batch_of_pads_gives_a_zero_with_a_gradient():
    def forbidden(**kwargs):
        raise AssertionError("called")

    rows = Rows()
    output, data = rows.micro_batch(
        [PAD, PAD], [], "log_probs", dp_size=2, real_rows=5, reporting_ranks=1
    )
    loss, metrics = RealRowsLoss(forbidden)(model_output=output, data=data)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert list(metrics) == [MICRO_BATCHES]
    loss.backward()
