"""Every advantage estimator that verl registers, through verl's own method: pads in the queue change nothing.

verl's ``_compute_advantage`` runs twice on the same rows, before a pad is made and while pads wait in TransferQueue:
advantages, returns, rewards, the controller of the in-reward KL and the metrics must be the same to the last bit.
"""

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController

from tests.pads.rows_in_queue import PARTITION, put_rows, queue_content
from tests.trainer.trainer_without_workers import padded_trainer
from verl_padding.job import ACTOR, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.pads.padded_batch import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (8, 4), (2, 5)]
KEYS = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0", "b_1_1", "c_0_0", "c_1_0"]
COLUMNS = ("rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
RESULTS = ("advantages", "returns", "token_level_rewards", "response_mask", "rollout_is_weights")

VERLS_LIMITS = {
    "gdpo": "needs fields that the v1 trainer does not select",
    "optimal_token_baseline": "needs fields that the v1 trainer does not select",
    "remax": "needs reward_baselines, which the v1 trainer does not make",
    "tir_optimal_token_baseline": "needs fields that the v1 trainer does not select",
}
"""Estimators that fail in verl 0.9.1's v1 trainer without any pad."""


def put_scored_rows():
    generator = torch.Generator().manual_seed(0)
    batch = put_rows(LENGTHS, KEYS)
    fields = {
        name: torch.nested.as_nested_tensor(
            [torch.randn(response, generator=generator) for _, response in LENGTHS], layout=torch.jagged
        )
        for name in COLUMNS
    }
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(batch)), tags=batch.tags
    )


def computed(trainer, batch, metrics):
    """What verl's method leaves in the queue, and the controller's coefficient; or the error it ends with."""
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10)
    torch.manual_seed(0)
    try:
        trainer._compute_advantage(batch, metrics)
    except Exception as error:  # whatever verl raises, the same must come with pads
        return type(error), str(error)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    rows = {
        name: [row.tolist() for row in data[name].unbind()]
        for name in RESULTS
        if name in data.keys()  # noqa: SIM118  (a TensorDict)
    }
    return rows, trainer.kl_ctrl_in_reward.value


@pytest.mark.parametrize("correction", [False, True], ids=["", "rollout correction"])
@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_an_estimator_gives_with_pads_in_the_queue_what_it_gives_without(name, correction):
    overrides = [f"algorithm.adv_estimator={name}", "algorithm.use_kl_in_reward=true"]
    if correction:
        correct = "algorithm.rollout_correction"
        overrides += [
            f"{correct}.rollout_is=token",
            f"{correct}.rollout_rs=token_k1",
            f"{correct}.rollout_rs_threshold=0.5_2.0",
        ]
    if name == "gae":
        overrides += ["critic.ppo_mini_batch_size=2"]
    trainer = padded_trainer(*overrides)
    trainer._dp_sizes = lambda: dict.fromkeys((ACTOR, CRITIC, LOG_PROB, REF, VALUES), 2)
    try:
        plain_metrics, padded_metrics = {}, {}
        without = computed(trainer, put_scored_rows(), plain_metrics)
        batch = put_scored_rows()
        trainer._balance_batch(batch, {})
        assert trainer._padded_batch.plan.n_pads > 0
        assert len(queue_content()) > len(batch)
        with_pads = computed(trainer, batch, padded_metrics)
        strip(trainer._padded_batch)
        assert with_pads == without
        assert padded_metrics == plain_metrics
        failed = isinstance(without[0], type)
        assert failed == (name in VERLS_LIMITS), without
        if not failed:
            assert any(any(row) for row in without[0]["advantages"])
            assert plain_metrics
    finally:
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
