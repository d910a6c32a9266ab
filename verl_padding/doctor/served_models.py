"""The models that a job serves: the actor's own, a reward model, teachers."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_padding.job.roles_of_job import has_critic

ACTOR_MODEL = "actor_rollout_ref.model.path"
ONLY_TEACHER = "teacher_model"
"""verl passes over the teacher of this name where there are others."""


def settings_of_models(config: DictConfig) -> Iterator[str]:
    """Settings with the path of a model that the job loads."""
    yield ACTOR_MODEL
    if has_critic(config):
        yield "critic.model.path"
    if config.reward.reward_model.enable:
        yield "reward.reward_model.model_path"
    for teacher in _teachers(config):
        yield f"{teacher}.model_path"


def settings_of_rollouts(config: DictConfig) -> Iterator[str]:
    """Settings with the name of a rollout that serves a model of the job."""
    yield "actor_rollout_ref.rollout.name"
    if config.reward.reward_model.enable:
        yield "reward.reward_model.rollout.name"
    for teacher in _teachers(config):
        yield f"{teacher}.inference.name"


def _teachers(config: DictConfig) -> list[str]:
    if not OmegaConf.select(config, "distillation.enabled"):
        return []
    names = list(map(str, config.distillation.teacher_models))
    if len(names) > 1:
        names = [name for name in names if name != ONLY_TEACHER]
    return [f"distillation.teacher_models.{name}" for name in names]
