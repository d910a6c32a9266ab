"""Every policy and distillation loss that verl registers gives, with pads, the gradient that it gives without them.

The reference is verl's own ``ppo_loss`` on the same micro-batches with the pads taken out, and with the number of real
rows as ``global_batch_size``: some losses pick tokens inside a micro-batch, so how rows are packed matters to them.
"""

import pytest
import torch
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from tests.tolerance import RELATIVE_FLOAT64
from tests.trainer.losses_on_rows import (
    LAYOUTS,
    MODES,
    Rows,
    distilling_loss,
    policy_loss,
    run_as_verl_does,
    without_pads,
)
from verl_padding.trainer.losses import RealRowsLoss


class Seeded:
    """A loss whose random choices are the same whenever it meets the same rows."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, model_output, data, dp_group=None):
        torch.manual_seed(int(data["advantages"].values().sum().abs() * 1e6))
        return self.loss(model_output=model_output, data=data, dp_group=dp_group)


def assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout):
    rows = Rows()

    def without_metrics(**kwargs):  # verl cannot add them up where ranks have different numbers of micro-batches
        return loss(**kwargs)[0], {}

    want, _ = run_as_verl_does(without_metrics, rows, without_pads(layout), "log_probs", nominal=rows.n_real)
    got, _ = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, "log_probs")
    assert any(grad.abs().max() > 0 for grad in want)
    for padded, plain in zip(got, want, strict=True):
        torch.testing.assert_close(padded, plain, rtol=RELATIVE_FLOAT64, atol=1e-15)


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_a_registered_loss_gives_the_gradient_of_a_batch_without_pads(name, mode, layout):
    assert_the_gradient_is_that_of_a_batch_without_pads(Seeded(policy_loss(mode, name)), layout)


@LAYOUTS
@pytest.mark.parametrize("task_rewards", [True, False], ids=["with rewards", "alone"])
@pytest.mark.parametrize("policy_gradient", [True, False], ids=["policy gradient", "supervised"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(DISTILLATION_LOSS_REGISTRY))
def test_a_registered_distillation_loss_does_too(name, mode, policy_gradient, task_rewards, layout):
    if (name, policy_gradient) == ("k1", False):
        with pytest.raises(ValueError, match="incorrect"):  # verl's word: supervised, k1 knows nothing of the teacher
            distilling_loss(mode, name, policy_gradient=policy_gradient)
        return
    loss = distilling_loss(mode, name, policy_gradient=policy_gradient, task_rewards=task_rewards)
    assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout)
