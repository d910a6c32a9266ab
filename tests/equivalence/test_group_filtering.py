"""verl's group filtering, with its real replay buffers: pads that wait in the queue are no group and filter none."""

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from tests.support.rows_in_queue import PARTITION, empty_queue, put_rows
from tests.support.trainer_without_workers import padded_trainer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

REWARDS = {"a_0_0": 1.0, "a_1_0": 0.0, "b_0_0": 1.0, "b_1_0": 1.0, "c_0_0": 0.5, "c_0_1": 0.5, "c_1_0": 0.2}
"""By row; the sessions of prompt b tell nothing, since all have one reward."""


def put_finished_prompts():
    lengths = [(3 + i, 1) for i in range(len(REWARDS))]
    batch = put_rows(lengths, list(REWARDS))
    rewards = torch.tensor(list(REWARDS.values())).unsqueeze(1)
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=TensorDict({"rm_scores": rewards}, len(batch)))
    tags = [{"is_prompt": True, "status": "finished", "global_steps": 7}] * 3
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id=PARTITION, tags=tags)
    return batch


def sampled(kind):
    buffer = kind(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.01,
        refill_fn=lambda prompts: None,
        filter_groups_metric="reward",
        train_batch_size=2,
        gen_batch_size=1,
    )
    batch, metrics = buffer.sample(global_steps=7, partition_id=PARTITION, batch_size=2)
    return sorted(batch.keys), metrics


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_the_groups_that_are_filtered_are_those_without_pads(kind):
    put_finished_prompts()
    keys, metrics = without = sampled(kind)
    empty_queue()

    batch, trainer = put_finished_prompts(), padded_trainer()
    trainer._balance_batch(batch, {})
    assert trainer._padded_batch.plan.n_pads > 0
    assert sampled(kind) == without
    assert keys == ["a_0_0", "a_1_0", "c_0_0", "c_0_1", "c_1_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 1
