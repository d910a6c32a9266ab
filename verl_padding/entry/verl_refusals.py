"""What verl itself refuses before a job's first step, found by calling verl's own code that refuses it.

All such code is called that needs no Ray, no worker and no model: the check of ``verl.trainer.main_ppo``, the trainer's
constructor and its plan of the GPUs, and the typed configs that trainer, workers and rollout make of their sections.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.job.role_engine import ref_as_actor
from verl_padding.job.roles_of_job import has_critic, has_reference, has_separate_reference


def verl_refusals(config: DictConfig) -> Iterator[tuple[str, Exception]]:
    """(part of verl, its exception) for each part that refuses the job; the config itself is not changed.

    Errors of the plug-in itself are not among them.
    """
    for part, call in CALLS.items():
        try:
            with redirect_stdout(io.StringIO()):  # verl prints notices
                call(config)
        except PaddingError:
            continue
        except Exception as refusal:  # verl raises anything from AssertionError to Hydra's own
            yield part, refusal


def refuse_what_verl_refuses(config: DictConfig) -> None:
    """Refuses a job that verl would refuse later, in part only after its workers have started.

    Raises:
        PaddingConfigError: a part of verl refuses the job; the first one is quoted.
    """
    for part, refusal in verl_refusals(config):
        raise PaddingConfigError(f"{part} refuses this job: {type(refusal).__name__}: {refusal}") from refusal


def _check_of_main(config: DictConfig) -> None:
    from verl.utils.config import validate_config

    validate_config(config=config, use_reference_policy=has_reference(config), use_critic=has_critic(config))


def n_gpus_of_pools(config: DictConfig) -> int:
    """Devices that verl's trainer asks Ray for: those of all its pools."""
    with redirect_stdout(io.StringIO()):
        return int(_trainer(config).resource_pool_manager.get_n_gpus())


def _trainer(config: DictConfig) -> Any:
    from verl_padding.driver.trainers import trainer_without_own_parts

    trainer = trainer_without_own_parts(deepcopy(config))
    trainer._init_resource_pool_mgr()
    return trainer


def _rollout(config: DictConfig) -> None:
    _typed(config.actor_rollout_ref.rollout)


def _ref(config: DictConfig) -> None:
    if has_separate_reference(config):
        _typed(OmegaConf.create(ref_as_actor(config)))


def _distillation(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_teacher_policy

    if need_teacher_policy(config):
        _typed(config.distillation)


def _names(config: DictConfig) -> None:
    """Names that verl looks up in its registries, unless code that is loaded before may add to these."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    looked_up: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
        "algorithm.adv_estimator": (get_adv_estimator_fn, (EXTERNAL_LIB, *LOADED_BY_TRAINER)),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (get_policy_loss_fn, (EXTERNAL_LIB,)),
    }
    for setting, (look_up, own_code) in looked_up.items():
        if any(OmegaConf.select(config, own) for own in own_code):
            continue
        value = OmegaConf.select(config, setting)
        try:
            look_up(value)
        except ValueError as unknown:
            raise ValueError(f"{setting}={value}: {unknown}") from unknown


def _loss(config: DictConfig) -> None:
    from verl_padding.driver.tried_loss import try_policy_loss

    try_policy_loss(config)


def _reward_manager(config: DictConfig) -> None:
    """verl's own, as each of its reward workers makes it, unless making one leaves something behind."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    manager = REWARD_MANAGER.get(config.reward.reward_manager.name)
    is_verls = manager is not None and manager.__module__.startswith("verl.")
    if config.reward.reward_manager.source == "register" and is_verls and manager.__name__ not in LEAVES_BEHIND:
        manager(deepcopy(config), None, None)


def _skip(config: DictConfig) -> None:
    from verl.utils.skip import SkipManagerConfig

    _typed(config.skip, SkipManagerConfig)


def _typed(section: DictConfig, dataclass_type: type[Any] | None = None) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(section, dataclass_type)


EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
AGENT = "actor_rollout_ref.rollout.agent"
LOADED_BY_TRAINER = (
    "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
    "trainer.checkpoint_callback_class",
    f"{AGENT}.agent_loop_manager_class",
)
"""Settings of code of the user's own that the process that trains loads before its first step."""

LEAVES_BEHIND = ("RemoteRewardManager", "RateLimitedRewardManager")
"""Reward managers that start actors, or keep the limits of the first one for all that a process makes."""

CALLS: dict[str, Callable[[DictConfig], object]] = {
    "verl's own check": _check_of_main,
    "verl's trainer": _trainer,
    "verl's rollout": _rollout,
    "verl's reference": _ref,
    "verl's estimators and losses": _names,
    "verl's policy loss": _loss,
    "verl's reward manager": _reward_manager,
    "verl's distillation": _distillation,
    "verl's skipped rollouts": _skip,
}
