"""Which roles a job has beside the actor, by the rules of verl 0.9. Neither verl nor torch is imported for it."""

from __future__ import annotations

from omegaconf import DictConfig


def has_critic(config: DictConfig) -> bool:
    """Whether there is a critic, as verl's ``need_critic`` (trainer/ppo/utils.py) says."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return bool(config.algorithm.adv_estimator == "gae")


def has_reference(config: DictConfig) -> bool:
    """Whether the actor is compared with a reference, as verl's ``need_reference_policy`` says."""
    return bool(config.algorithm.get("use_kl_in_reward", False) or config.actor_rollout_ref.actor.use_kl_loss)


def has_separate_reference(config: DictConfig) -> bool:
    """Whether verl makes a model for the reference: there is one, and no LoRA actor serves without its adapter."""
    return has_reference(config) and not is_lora(config)


def is_lora(config: DictConfig) -> bool:
    """Whether the actor is an adapter, by the rule of verl's v1 trainer."""
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank") or model.get("lora_rank") or 0
    return rank > 0 or model.get("lora_adapter_path") is not None
