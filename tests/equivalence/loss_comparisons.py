"""A loss on a padded layout beside verl's own, called once for all real rows."""

import math

import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.metric import Metric

from tests.support.losses_on_rows import Rows, run_as_verl_does, without_pads
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.worker.losses import MICRO_BATCHES, RealRowsLoss
from verl_padding.worker.row_means import PREFIX

POLICY_LOSSES = sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX))
NOT_ADDITIVE = ("_std", "_eff_sample_size")
"""Ends of the names of metrics that those of micro-batches do not add up to."""
PACKING_MATTERS = ("clip_cov", "kl_cov")
"""Losses of verl that choose tokens inside a micro-batch, and so depend on how rows are packed."""


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
