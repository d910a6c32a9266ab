"""Every loss that verl registers gives, with pads and untrained rows, what it gives without the
pads.

The reference is verl's own loss, on one rank, in one call for all real rows, with the number of
those that have a token with a loss as ``global_batch_size``. Losses that choose tokens inside a
micro-batch depend on how rows are packed: theirs is the same micro-batches with the pads taken out.
Rows without a token with a loss change nothing; rows whose tokens were rejected count in
denominators, and change nothing else.
"""

import inspect

import pytest
import torch
from omegaconf import open_dict
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

from tests.support.loss_comparisons import (
    DISTILLING,
    PACKING_MATTERS,
    POLICY_LOSSES,
    assert_metrics_are_those_of_the_rows_that_train,
    metrics_where_gradients_agree,
    seeded,
)
from tests.support.losses_on_rows import (
    IDLE_RANK,
    MODES,
    PAD,
    SPREAD,
    Rows,
    critic_loss,
    distilling_loss,
    in_each_mode,
    policy_loss,
    run_as_verl_does,
)
from tests.support.verl_config import compose_job
from verl_padding.job.loss_weightings import packing_incompatibility
from verl_padding.worker.losses import MICRO_BATCHES, RealRowsLoss

# [rank][micro-batch] -> rows; in the last four, 1 and 3 have no trained token.
LAYOUTS = {
    "pads are spread": SPREAD,
    "a rank holds pads alone": IDLE_RANK,
    "an untrained micro-batch": [[[0, 2], [1, 3]], [[4], [PAD]]],
    "an untrained micro-batch, beside a pad": [[[0], [1, PAD]], [[2, 4], [PAD, 3]]],
    "an untrained rank": [[[1], [3, PAD]], [[0, 2], [4]]],
    "an untrained part of a micro-batch": [[[0, 1], [2, PAD]], [[3, 4], [PAD]]],
}
PADS_AND_UNTRAINED = ("a rank holds pads alone", "an untrained part of a micro-batch")
# Rows are left out before a loss sees them: all layouts of one loss, of one that has no value
# without a trained token, and of those that depend on how rows are packed.
LOSSES_ON_LAYOUTS = [
    (name, layout)
    for name in POLICY_LOSSES
    for layout in (
        LAYOUTS if name in ("vanilla", "bypass_mode", *PACKING_MATTERS) else PADS_AND_UNTRAINED
    )
]
EACH_LAYOUT = pytest.mark.parametrize("name_of_layout", LAYOUTS)
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def assert_trains_alike(
    loss, name_of_layout, output_name="log_probs", *, packing_matters=False, rejected=False
):
    masked = (1, 3) if "untrained" in name_of_layout else ()
    rows = Rows(*masked, rejected=rejected)
    loss = seeded(loss) if packing_matters else loss
    metrics = metrics_where_gradients_agree(
        loss, LAYOUTS[name_of_layout], output_name, rows=rows, packing_matters=packing_matters
    )
    but = ("actor/pg_loss", *(("actor/pg_clipfrac",) if masked else ())) if packing_matters else ()
    assert_metrics_are_those_of_the_rows_that_train(loss, metrics, output_name, rows=rows, but=but)


@pytest.mark.parametrize(("name", "name_of_layout", "mode"), in_each_mode(LOSSES_ON_LAYOUTS))
def test_a_registered_loss_gives_the_gradient_of_a_batch_without_pads(name, mode, name_of_layout):
    assert_trains_alike(
        policy_loss(mode, name), name_of_layout, packing_matters=name in PACKING_MATTERS
    )


@pytest.mark.parametrize(
    ("name_of_layout", "task_rewards"),
    [("a rank holds pads alone", True), ("an untrained rank", False)],
)
@pytest.mark.parametrize(("name", "policy_gradient", "mode"), in_each_mode(DISTILLING, "k3"))
def test_a_registered_distillation_loss_does_too(
    name, policy_gradient, mode, name_of_layout, task_rewards
):
    loss = distilling_loss(mode, name, policy_gradient=policy_gradient, task_rewards=task_rewards)
    assert_trains_alike(loss, name_of_layout)


@EACH_LAYOUT
@EACH_MODE
def test_so_does_the_value_loss(mode, name_of_layout):
    assert_trains_alike(critic_loss(mode), name_of_layout, "values")


@pytest.mark.parametrize("name_of_layout", list(LAYOUTS)[2:])
@EACH_MODE
def test_rows_whose_tokens_are_all_rejected_are_untrained(mode, name_of_layout):
    assert_trains_alike(policy_loss(mode), name_of_layout, rejected=True)


NORMALIZED = RolloutCorrectionConfig(
    bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_depends_on_the_packing_where_a_job_may_not_pack(name, normalized):
    said = {"rollout_correction": NORMALIZED} if normalized and name == "bypass_mode" else {}
    loss, rows = policy_loss("token-mean", name, **said), Rows()
    loss = RealRowsLoss(seeded(loss) if name in PACKING_MATTERS else loss)
    cuts = [[[0, 1, 2, 3, 4]]], [[[0], [1, 2], [3], [4]]], [[[0, 4], [1]], [[2], [3]]]
    gradients = [torch.cat(run_as_verl_does(loss, rows, cut, "log_probs")[0]) for cut in cuts]
    whole, *others = gradients
    depends = any((each - whole).norm() > 1e-9 * whole.norm() for each in others)
    config = compose_job(f"actor_rollout_ref.actor.policy_loss.loss_mode={name}")
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss.update(
            {key: {"rollout_is_batch_normalize": True} for key in said}
        )
    assert depends == bool(packing_incompatibility(config))


LOSSES = {
    **dict.fromkeys(POLICY_LOSSES, policy_loss),
    **dict.fromkeys(
        {name for name, policy_gradient in DISTILLING if not policy_gradient}, distilling_loss
    ),
}


@pytest.mark.parametrize(("name", "mode"), in_each_mode(["critic", *sorted(LOSSES)]))
def test_a_mini_batch_without_a_trained_token_has_losses_of_zero(name, mode):
    output_name = "values" if name == "critic" else "log_probs"
    loss = RealRowsLoss(critic_loss(mode) if name == "critic" else LOSSES[name](mode, name))
    layout = [[[0, 1], [2, PAD]], [[3, 4], [PAD]]]
    rows = Rows(*range(5))
    for known in (set(), {f"{output_name} loss", "other"}):
        loss._reported_losses = known
        gradients, metrics = run_as_verl_does(loss, rows, layout, output_name)
        assert all(gradient is None or gradient.abs().max() == 0 for gradient in gradients)
        assert metrics == {MICRO_BATCHES: 2} | dict.fromkeys(known, 0.0)

    _, trained = run_as_verl_does(loss, Rows(), layout, output_name)
    _, metrics = run_as_verl_does(loss, rows, layout, output_name)
    assert {name for name in metrics if name.endswith("loss")} >= {
        name
        for name in trained
        if name.endswith(("pg_loss", "vf_loss", "kl_loss", "entropy_loss", "/loss"))
    }
    assert set(metrics.values()) <= {0.0, 2.0}


def presets(prefix):
    """verl's rollout corrections by name, of those whose names begin so."""
    makers = inspect.getmembers(RolloutCorrectionConfig, inspect.ismethod)
    found = {name: make() for name, make in makers if name.startswith(prefix)}
    assert len(found) >= 5
    return found


BYPASS = presets("bypass_")


@pytest.mark.parametrize(("name", "mode"), in_each_mode(BYPASS))
def test_a_bypass_loss_gives_the_gradient_of_a_batch_without_pads(name, mode):
    loss = policy_loss(mode, "bypass_mode", rollout_correction=BYPASS[name])
    metrics_where_gradients_agree(loss, IDLE_RANK)


@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
@pytest.mark.parametrize("option", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_metrics_of_a_bypass_are_those_of_all_real_rows_at_once(option, rollout_is):
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type="reinforce",
        rollout_is=rollout_is,
        rollout_rs=option,
        rollout_rs_threshold="0.9_1.1" if option.endswith("k1") else "0.05",
    )
    # The mask of what is left after the rejection is known inside the loss only, so its tokens
    # cannot weigh.
    of_the_rest = ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "clipfrac")
    # Of rows with one way of weighting and of tokens with the other, under one name.
    ambiguous = (
        ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low")
        if rollout_is == "sequence"
        else ()
    )
    loss = policy_loss("token-mean", "bypass_mode", rollout_correction=correction)
    metrics = metrics_where_gradients_agree(loss, SPREAD)
    assert_metrics_are_those_of_the_rows_that_train(loss, metrics, but=(*of_the_rest, *ambiguous))
