"""Every rollout correction that verl knows gives, with pads, what it gives without them.

In the decoupled modes verl's trainer computes weights, rejections and metrics from the real rows; in the bypass modes
the actor's loss does, of each micro-batch.
"""

import inspect

import pytest
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

from tests.equivalence.advantages_in_queue import without_and_with_pads
from tests.equivalence.loss_comparisons import (
    assert_metrics_are_those_of_the_rows_that_train,
    metrics_where_gradients_agree,
)
from tests.support.losses_on_rows import LAYOUTS, MODES, policy_loss

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

PRESETS = {
    name: make()
    for name, make in inspect.getmembers(RolloutCorrectionConfig, inspect.ismethod)
    if name.startswith(("decoupled_", "bypass_"))
}
DECOUPLED = sorted(name for name, preset in PRESETS.items() if not preset.bypass_mode)
BYPASS = sorted(name for name, preset in PRESETS.items() if preset.bypass_mode)
assert min(len(DECOUPLED), len(BYPASS)) >= 5


def overrides(preset: RolloutCorrectionConfig) -> list[str]:
    fields = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    values = {name: "null" if getattr(preset, name) is None else getattr(preset, name) for name in fields}
    return [f"algorithm.rollout_correction.{name}={value}" for name, value in values.items()]


@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize("name", DECOUPLED)
def test_a_decoupled_correction_computes_from_real_rows(name, normalize):
    settings = [*overrides(PRESETS[name]), f"algorithm.rollout_correction.rollout_is_batch_normalize={normalize}"]
    without, with_pads = without_and_with_pads("grpo", *settings)
    assert with_pads == without
    assert without.error is None
    assert len([name for name in without.metrics if name.startswith("rollout_corr/")]) > 5


@pytest.mark.parametrize("option", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_every_rejection_rejects_what_it_rejects_without_pads(option):
    two_sided = "0.5_1.5" if option.endswith("k1") else "0.5"
    preset = RolloutCorrectionConfig(rollout_is=None, rollout_rs=option, rollout_rs_threshold=two_sided)
    without, with_pads = without_and_with_pads("grpo", *overrides(preset))
    assert with_pads == without
    rejected = [token for row in without.rows["response_mask"] for token in row if not token]
    assert rejected, "nothing was rejected"


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BYPASS)
def test_a_bypass_loss_gives_the_gradient_of_a_batch_without_pads(name, mode, layout):
    loss = policy_loss(mode, "bypass_mode", rollout_correction=PRESETS[name])
    metrics_where_gradients_agree(loss, layout)


@LAYOUTS
@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
@pytest.mark.parametrize("option", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_what_a_bypass_tells_of_its_correction_is_that_of_all_real_rows_at_once(option, rollout_is, layout):
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type="reinforce",
        rollout_is=rollout_is,
        rollout_rs=option,
        rollout_rs_threshold="0.9_1.1" if option.endswith("k1") else "0.05",
    )
    # The mask of what is left after the rejection is known inside the loss only, so its tokens cannot weigh.
    of_the_rest = ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "clipfrac")
    # Of rows with one way of weighting and of tokens with the other, under one name.
    ambiguous = ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low") if rollout_is == "sequence" else ()
    loss = policy_loss("token-mean", "bypass_mode", rollout_correction=correction)
    metrics = metrics_where_gradients_agree(loss, layout)
    assert_metrics_are_those_of_the_rows_that_train(loss, metrics, but=(*of_the_rest, *ambiguous))
