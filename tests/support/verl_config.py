"""verl's own config, composed by Hydra as ``verl.trainer.main_ppo`` does."""

import verl  # noqa: F401  (loads the plug-in, which puts its configs on Hydra's search path)
from hydra import compose, initialize_config_module

DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    "algorithm.adv_estimator=grpo",
)

SEPARATE = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.v1.separate_async.parameter_sync_step=4",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)
"""What verl's own constructor of separate_async wants; the other modes run with it too."""


def compose_job(*overrides):
    """verl's ``ppo_trainer`` config with overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def compose_padded(*overrides):
    """A padded job whose micro-batches are cut by token budgets."""
    return compose_job("+padding=prompt", *DYNAMIC, *overrides)
