"""Every policy and distillation loss that verl registers gives, with pads, the gradient that it gives without them.

The reference is verl's own ``ppo_loss``, on one rank, in one call for all real rows, with their number as
``global_batch_size``. Losses that choose tokens inside a micro-batch depend on how rows are packed: theirs is the same
micro-batches with the pads taken out.
"""

import math

import pytest
import torch
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.metric import Metric

from tests.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from tests.trainer.losses_on_rows import (
    LAYOUTS,
    MODES,
    Rows,
    distilling_loss,
    policy_loss,
    run_as_verl_does,
    without_pads,
)
from verl_padding.trainer.losses import MICRO_BATCHES, RealRowsLoss
from verl_padding.trainer.row_means import PREFIX


class Seeded:
    """A loss whose random choices are the same whenever it meets the same rows."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, model_output, data, dp_group=None):
        torch.manual_seed(int(data["advantages"].values().sum().abs() * 1e6))
        return self.loss(model_output=model_output, data=data, dp_group=dp_group)


def assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout, *, packing_matters=False):
    """In verl's own loss, called once for all rows on one rank, if their packing does not matter to it."""
    rows = Rows()
    plain_layout = without_pads(layout) if packing_matters else [[list(range(rows.n_real))]]

    def without_metrics(**kwargs):  # verl cannot add them up where ranks have different numbers of micro-batches
        return loss(**kwargs)[0], {}

    want, _ = run_as_verl_does(without_metrics, rows, plain_layout, "log_probs", nominal=rows.n_real)
    got, _ = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, "log_probs")
    assert any(grad.abs().max() > 0 for grad in want)
    for padded, plain in zip(got, want, strict=True):
        torch.testing.assert_close(padded, plain, rtol=RELATIVE_FLOAT64, atol=1e-15)


def assert_the_metrics_are_those_of_all_rows_at_once(loss, layout, *, but=()):
    rows = Rows()
    n = rows.n_real
    output, data = rows.micro_batch(
        range(n), rows.leaves(), "log_probs", dp_size=1, real_rows=n, reporting_ranks=1, nominal=n
    )
    _, told = loss(model_output=output, data=data, dp_group=None)
    want = {key: value.aggregate() if isinstance(value, Metric) else value for key, value in told.items()}
    _, got = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, "log_probs")
    assert got.keys() - {MICRO_BATCHES} == want.keys()
    compared = [key for key in want if not key.endswith((*NOT_ADDITIVE, *but))]
    assert len(compared) >= 3
    for key in compared:
        assert math.isclose(got[key], want[key], rel_tol=RELATIVE_FLOAT32, abs_tol=1e-12), key


POLICY_LOSSES = sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX))
NOT_ADDITIVE = ("_std", "_eff_sample_size")
"""Ends of the names of metrics that those of micro-batches do not add up to."""
PACKING_MATTERS = ("clip_cov", "kl_cov")
"""Losses of verl that choose tokens inside a micro-batch, and so depend on how rows are packed."""


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_registered_loss_gives_the_gradient_of_a_batch_without_pads(name, mode, layout):
    if name in PACKING_MATTERS:
        loss = Seeded(policy_loss(mode, name))
        assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout, packing_matters=True)
    else:
        assert_the_gradient_is_that_of_a_batch_without_pads(policy_loss(mode, name), layout)


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_metrics_of_a_registered_loss_are_those_of_all_real_rows_at_once(name, mode, layout):
    but = ("actor/pg_loss",) if name in PACKING_MATTERS else ()
    assert_the_metrics_are_those_of_all_rows_at_once(policy_loss(mode, name), layout, but=but)


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
    assert_the_metrics_are_those_of_all_rows_at_once(loss, layout)
