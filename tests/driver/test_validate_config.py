"""With fixed micro-batches the rows of a padded batch need not be a multiple of what verl's ranks
take at once."""

import pytest
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.config import validate_config

from tests.support.verl_config import compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.driver.trainers import PaddedTrainerSync
from verl_padding.errors import PaddingConfigError

FIVE_TIMES_THREE = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=5",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_mini_batch_size=5",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "trainer.n_gpus_per_node=2",
)


def validate(config, check=validate_config):
    check(config=config, use_reference_policy=False, use_critic=False)


FLAG, MODE = "+padding=prompt", "trainer.v1.trainer_mode"


class Mine(PaddedTrainerSync):
    """A trainer of somebody's own."""


@pytest.mark.parametrize("mode", ["sync", "mine"])
def test_a_padded_job_passes_and_keeps_its_config(mode, monkeypatch):
    monkeypatch.setitem(TRAINER_REGISTRY, "mine", Mine)
    config = compose_job(*FIVE_TIMES_THREE, FLAG, f"{MODE}={mode}")
    validate(config)
    validate_config(config, False, False)
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (5, 3)
    reader = check_job(config)
    job = reader.planner_job()
    assert (job.prompts, job.updates["actor"].dp_size, job.updates["actor"].micro_batch_rows) == (
        5,
        2,
        2,
    )


def test_a_job_that_means_to_be_padded_and_is_not_is_refused():
    with pytest.raises(PaddingConfigError, match=r"^\+paddng=fast: .*\+padding=fast"):
        validate(compose_job(*FIVE_TIMES_THREE, "+paddng=fast"))


def test_verls_own_function_still_needs_it():
    with pytest.raises(AssertionError, match=r"real_train_batch_size \(15\) must be divisible"):
        validate(compose_job(*FIVE_TIMES_THREE))
    # When this fails, verl takes such batches by itself, and our function around it can go.
    with pytest.raises(AssertionError, match="must be divisible"):
        validate(compose_job(*FIVE_TIMES_THREE, "+padding=prompt"), validate_config.__wrapped__)
