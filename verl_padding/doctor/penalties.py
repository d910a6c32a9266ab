"""Whether verl has the KL penalties that a job names."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, wrong

COEFFICIENTS = {"actor_rollout_ref.actor.kl_loss_type": "actor_rollout_ref.actor.kl_loss_coef"}
"""Kind of a penalty -> its weight, where that is a setting of its own."""


def penalties_of_job(config: DictConfig) -> Iterator[Finding]:
    """Those of the actor's loss and of the rewards, each tried on a token."""
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty

    used = {
        "actor_rollout_ref.actor.kl_loss_type": config.actor_rollout_ref.actor.use_kl_loss,
        "algorithm.kl_penalty": config.algorithm.use_kl_in_reward,
    }
    named = (config.actor_rollout_ref.actor.kl_loss_type, config.algorithm.kl_penalty)
    for (setting, is_used), name in zip(used.items(), named, strict=True):
        if not is_used:
            continue
        if setting in COEFFICIENTS and OmegaConf.select(config, COEFFICIENTS[setting]) is None:
            yield wrong(COEFFICIENTS[setting], "null: the actor's loss has a KL term, which this multiplies. Set it.")
        try:
            kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)
        except NotImplementedError:
            yield wrong(setting, f"{name}: verl has no such KL penalty. Choose kl, abs, mse or low_var_kl.")
        else:
            yield ok(setting, name)
