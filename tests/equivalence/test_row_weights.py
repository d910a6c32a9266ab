"""Rows and sessions that weigh differently, in every loss that verl registers, against the formula
written out.

The reference is verl's own loss on each row by itself, without a denominator; the sums over rows,
and what they are divided by, are written out here. Where a loss is not that sum, a job that weighs
rows differently is refused.
"""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import verl
from omegaconf import open_dict
from verl.utils import tensordict_utils as tu

from tests.support.loss_comparisons import DISTILLING, POLICY_LOSSES, seeded
from tests.support.losses_on_rows import (
    LAYOUTS,
    MODES,
    QUICK_MODE,
    SPREAD,
    Rows,
    critic_loss,
    distilling_loss,
    in_each_mode,
    nested,
    policy_loss,
    run_as_verl_does,
)
from tests.support.plan_oracles import layout_of_local_batches
from tests.support.tolerance import RELATIVE_FLOAT64
from tests.support.verl_config import compose_job
from verl_padding.config import PaddingConfig
from verl_padding.job.loss_weightings import loss_weighting
from verl_padding.job.verl_losses import MEANS_OVER_ROWS
from verl_padding.pads.loss_weighting import LOSS_WEIGHT, TOKEN_MODES, LossWeighting, loss_factors
from verl_padding.worker.losses import RealRowsLoss, scale_gradient

WEIGHTS = [2.0, 0.5, 0.0, 1.0, 0.75]
KEYS = [
    "a_0_0",
    "a_0_1",
    "a_0_2",
    "a_1_0",
    "b_0_0",
]  # three sessions: one of three rows, two of one
ALONE = layout_of_local_batches(5, [[(0, 1, 2, 3, 4)]])  # whatever its ranks and micro-batches
NOMINAL = 7
SETTINGS = [
    *[(mode, "rows") for mode in MODES],
    *[(mode, "nominal") for mode in MODES if mode not in TOKEN_MODES],
]
SETTING = pytest.mark.parametrize(("mode", "denominator"), SETTINGS)


class WeightedRows(Rows):
    """Rows that bring the factors of their weights."""

    def __init__(self, weighting, weight_R=WEIGHTS):
        super().__init__()
        tokens_R = [response for _, response in self.lengths]
        self.factor_R = loss_factors(ALONE, KEYS, weight_R, tokens_R, weighting)


def weighting(mode, denominator="rows", *, by_session=False):
    return LossWeighting(mode=mode, divides_by_rows=denominator == "rows", by_session=by_session)


def gradients_of_the_rows(loss, output_name):
    """Of each row's own loss: by itself, and divided by nothing."""
    rows, gradients = Rows(), []
    for row in range(rows.n_real):
        leaves = rows.leaves()
        shape = {"dp_size": 1, "real_rows": 1, "reporting_ranks": 1, "nominal": 1}
        output, data = rows.micro_batch([row], leaves, output_name, **shape)
        tu.assign_non_tensor(data, batch_num_tokens=1)
        loss(model_output=output, data=data, dp_group=None)[0].backward()
        gradients.append(
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        )
    return gradients


def over(mode, denominator, weight_R, count_R):
    """What the sum of w_r l_r is divided by.

    Args:
        count_R: what each row adds to it where rows are counted.
    """
    if mode == "token-sum":
        return 1.0
    if mode == "token-mean":
        return sum(w * n for w, (_, n) in zip(weight_R, Rows().lengths, strict=True))
    return sum(count_R) if denominator == "rows" else NOMINAL


def assert_weighed(loss, output_name, layout, rows, weight_R, mode, denominator, count_R=None):
    gradients = gradients_of_the_rows(loss, output_name)
    below = over(mode, denominator, weight_R, count_R or weight_R)
    got, metrics = run_as_verl_does(
        RealRowsLoss(loss), rows, layout, output_name, nominal=NOMINAL, denominator=denominator
    )
    for leaf, got_leaf in enumerate(got):
        want = (
            sum(weight * row[leaf] for weight, row in zip(weight_R, gradients, strict=True)) / below
        )
        torch.testing.assert_close(got_leaf, want, rtol=RELATIVE_FLOAT64, atol=1e-15)
    assert any(grad.abs().max() > 0 for grad in got)
    _, unweighted = run_as_verl_does(
        RealRowsLoss(loss), Rows(), layout, output_name, nominal=NOMINAL, denominator=denominator
    )
    assert metrics == unweighted, "metrics are those of rows that weigh the same"


@cache
def job_config():
    return compose_job("+padding=prompt", "algorithm.adv_estimator=grpo")


def refusal(name, mode, *, by_session=False, **settings):
    """Of rows, or sessions, that weigh differently, in a job with this policy loss."""
    config = job_config().copy()
    actor = config.actor_rollout_ref.actor
    actor.loss_agg_mode = mode
    with open_dict(actor.policy_loss):
        actor.policy_loss.update(loss_mode=name, **settings)
    padding = PaddingConfig(weighting="session" if by_session else "row")
    return loss_weighting(config, padding).refusal


QUICK = ("vanilla", *MEANS_OVER_ROWS)
NORMALIZED = {
    "rollout_correction": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
    }
}
"""Settings with which a bypass is no sum over rows."""


EACH_LOSS = [
    # What rows are divided by is no matter of the loss, but for means over rows.
    pytest.param(
        name,
        *setting,
        marks=() if name in QUICK or setting == (QUICK_MODE, "rows") else pytest.mark.slow,
    )
    for name in (*POLICY_LOSSES, "normalized bypass")
    for setting in SETTINGS
]


@pytest.mark.parametrize(("name", "mode", "denominator"), EACH_LOSS)
@pytest.mark.parametrize("by_session", [False, True], ids=["rows", "sessions"])
def test_a_registered_loss_is_the_weighted_sum_of_its_rows_or_is_refused(
    name, by_session, mode, denominator
):
    named, settings = (name, {}) if name in POLICY_LOSSES else ("bypass_mode", NORMALIZED)
    loss = policy_loss(mode, named, **settings)
    refused = refusal(named, mode, by_session=by_session, **settings)
    rows = WeightedRows(weighting(mode, denominator, by_session=by_session))
    weight_R, count_R = parts_of_sessions(mode, WEIGHTS) if by_session else (WEIGHTS, WEIGHTS)
    if by_session and name in MEANS_OVER_ROWS:
        # The session's mean, whatever the mode says: parts of it count as such.
        weight_R = count_R
    with pytest.raises(AssertionError, match="not close") if refused else nullcontext():
        assert_weighed(loss, "log_probs", SPREAD, rows, weight_R, mode, denominator, count_R)


@pytest.mark.parametrize(
    ("name", "policy_gradient", "mode"), in_each_mode(DISTILLING, all_modes_of="k3")
)
def test_so_is_a_registered_distillation_loss(name, policy_gradient, mode):
    loss = distilling_loss(mode, name, policy_gradient=policy_gradient)
    assert_weighed(loss, "log_probs", SPREAD, WeightedRows(weighting(mode)), WEIGHTS, mode, "rows")


@LAYOUTS
@SETTING
def test_so_is_the_value_loss(mode, denominator, layout):
    rows = WeightedRows(weighting(mode, denominator))
    assert_weighed(critic_loss(mode), "values", layout, rows, WEIGHTS, mode, denominator)


def parts_of_sessions(mode, weight_R):
    """w_r of each row if sessions weigh the same, and what it adds where sessions are counted."""
    tokens = [response for _, response in Rows().lengths]
    of_session = [sum(tokens[:3])] * 3 + tokens[3:]
    count_R = [w * n / s for w, n, s in zip(weight_R, tokens, of_session, strict=True)]
    if mode == "seq-mean-token-mean":
        return count_R, count_R
    if mode in TOKEN_MODES:
        return [w / s for w, s in zip(weight_R, of_session, strict=True)], count_R
    return weight_R, count_R


@pytest.mark.parametrize(("name", "mode"), in_each_mode(POLICY_LOSSES))
def test_weights_of_one_are_to_the_bit_what_no_weights_are(name, mode):
    loss = RealRowsLoss(seeded(policy_loss(mode, name)))
    got, metrics = run_as_verl_does(
        loss, WeightedRows(weighting(mode), [1.0] * 5), SPREAD, "log_probs"
    )
    want, unweighted = run_as_verl_does(loss, Rows(), SPREAD, "log_probs")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert metrics == unweighted


def test_a_row_that_weighs_nothing_adds_nothing_even_if_not_finite():
    leaf = torch.zeros(2, requires_grad=True)
    output = nested([leaf[:1], leaf[1:]])
    weighed = scale_gradient(output, torch.tensor([0.0, 3.0], dtype=torch.float64))
    (weighed.values() * torch.tensor([torch.inf, 2.0])).sum().backward()
    assert leaf.grad.tolist() == [0.0, 6.0]


def test_a_gradient_of_low_precision_is_multiplied_in_32_bits():
    leaf = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    factors = torch.tensor([1 / 3] * 3, dtype=torch.float64)  # 0.334 in bfloat16
    (
        scale_gradient(leaf * 1, factors) * torch.tensor([21.0, 123.0, 249.0], dtype=torch.bfloat16)
    ).sum().backward()
    assert leaf.grad.tolist() == [7.0, 41.0, 83.0]


def test_verl_does_not_weigh_rows_by_itself_yet():
    """An open change of verl has a field of the same name: once verl reads it, a weight would count
    twice."""
    files = Path(verl.__file__).parent.rglob("*.py")
    assert not [path for path in files if LOSS_WEIGHT in path.read_text()]
