"""Every advantage estimator that verl registers, through verl's own method: pads in the queue change nothing.

verl's ``_compute_advantage`` runs twice on the same rows, before a pad is made and while pads wait in TransferQueue:
advantages, returns, rewards, the controller of the in-reward KL and the metrics must be the same to the last bit.
"""

import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from tests.equivalence.advantages_in_queue import without_and_with_pads

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

CRITIC = ["critic.ppo_mini_batch_size=2"]

VERLS_LIMITS = {
    "gdpo": "needs fields that the v1 trainer does not select",
    "optimal_token_baseline": "needs fields that the v1 trainer does not select",
    "remax": "needs reward_baselines, which the v1 trainer does not make",
    "tir_optimal_token_baseline": "needs fields that the v1 trainer does not select",
}
"""Estimators that fail in verl 0.9.1's v1 trainer without any pad."""


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_an_estimator_gives_with_pads_in_the_queue_what_it_gives_without(name):
    without, with_pads = without_and_with_pads(name, *(CRITIC if name == "gae" else []))
    assert with_pads == without
    assert (without.error is not None) == (name in VERLS_LIMITS), without.error
    assert without.kl_coefficient != 0.2, "the controller was meant to move"
    assert without.metrics
    if without.error is None:
        assert any(any(row) for row in without.rows["advantages"])


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_draws_the_rows_that_it_draws_without_pads(method):
    plain, _ = without_and_with_pads("gae", *CRITIC)
    without, with_pads = without_and_with_pads(
        "gae",
        *CRITIC,
        "algorithm.use_pf_ppo=true",
        f"algorithm.pf_ppo.reweight_method={method}",
        "algorithm.pf_ppo.weight_pow=2.0",
    )
    assert with_pads == without
    assert without.error is None
    assert without.rows["advantages"] != plain.rows["advantages"], "no row was drawn"
