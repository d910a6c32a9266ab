"""A loss on a padded layout beside verl's own, called once for all real rows."""

import math

import torch
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.metric import AggregationType, Metric

from tests.support.losses_on_rows import Rows, run_as_verl_does
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.worker.losses import MICRO_BATCHES, PREFIX, RealRowsLoss

POLICY_LOSSES = sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX))
DISTILLING = [
    (name, policy_gradient)
    for name in sorted(DISTILLATION_LOSS_REGISTRY)
    for policy_gradient in (True, False)
    if (name, policy_gradient)
    != ("k1", False)  # refused by verl: supervised, k1 knows nothing of the teacher
]
NOT_ADDITIVE = (
    "_std",
    "_eff_sample_size",
)  # ends of the names of metrics that those of micro-batches do not add up to
PACKING_MATTERS = ("clip_cov", "kl_cov")
"""Losses of verl that choose tokens inside a micro-batch, and so depend on how rows are packed."""


def seeded(loss):
    """The loss, whose random choices are the same whenever it meets the same rows."""

    def told(model_output, data, dp_group=None):
        torch.manual_seed(int(data["advantages"].values().sum().abs() * 1e6))
        return loss(model_output=model_output, data=data, dp_group=dp_group)

    return told


def metrics_where_gradients_agree(
    loss, layout, output_name="log_probs", *, rows=None, packing_matters=False
):
    """Metrics of the padded layout, whose gradients must be those of verl's own loss on all rows.

    verl's loss is called once for all rows with a loss, on one rank; or, if their packing matters
    to it, for the micro-batches of the layout, without pads and rows that have no trained token.
    """
    rows = rows or Rows()
    with_loss = [row for row in range(rows.n_real) if rows.with_loss([row])]
    at_once = [[with_loss]]
    if packing_matters:
        ranks = [[[row for row in micro if rows.trains(row)] for micro in rank] for rank in layout]
        at_once = [[micro for micro in rank if micro] for rank in ranks]

    def without_metrics(
        **kwargs,
    ):  # verl cannot add them up where ranks have different numbers of micro-batches
        return loss(**kwargs)[0], {}

    want, _ = run_as_verl_does(without_metrics, rows, at_once, output_name, nominal=len(with_loss))
    got, metrics = run_as_verl_does(RealRowsLoss(loss), rows, layout, output_name)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in want)
    for row, (padded, plain) in enumerate(zip(got, want, strict=True)):
        zero = torch.zeros_like(rows.fields[row]["output"])
        padded, plain = (zero if gradient is None else gradient for gradient in (padded, plain))
        assert plain.isfinite().all()
        assert plain.abs().max() == 0 or row not in rows.masked
        torch.testing.assert_close(padded, plain, rtol=RELATIVE_FLOAT64, atol=1e-15)
    return metrics


def assert_metrics_are_those_of_the_rows_that_train(
    loss, metrics, output_name="log_probs", *, rows=None, but=()
):
    """Means are verl's over the rows that train alone; sums are divided by all rows with a loss."""
    rows = rows or Rows()
    with_loss = [row for row in range(rows.n_real) if rows.with_loss([row])]

    def verl_metrics(some):
        shape = {
            "dp_size": 1,
            "real_rows": len(with_loss),
            "reporting_ranks": 1,
            "nominal": len(with_loss),
        }
        output, data = rows.micro_batch(some, rows.leaves(), output_name, **shape)
        return loss(model_output=output, data=data, dp_group=None)[1]

    all_metrics, want = (
        verl_metrics(with_loss),
        verl_metrics(list(filter(rows.trains, range(rows.n_real)))),
    )
    want |= {
        name: value
        for name, value in all_metrics.items()
        if getattr(value, "aggregation", None) is AggregationType.SUM
    }
    assert metrics.keys() - {MICRO_BATCHES} == want.keys()
    compared = [name for name in want if not name.endswith((*NOT_ADDITIVE, *but))]
    assert len(compared) >= 3
    for name in compared:
        value = want[name].aggregate() if isinstance(want[name], Metric) else want[name]
        # verl takes fractions in float32, whatever the dtype of log-probs.
        tolerance = RELATIVE_FLOAT32 if "frac" in name else RELATIVE_FLOAT64
        assert math.isclose(metrics[name], value, rel_tol=tolerance, abs_tol=1e-12), name
