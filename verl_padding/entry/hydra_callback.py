"""Checks a job before Ray or any worker starts: what the plug-in refuses, and what verl itself would.

The latter by calling verl's own code that needs no Ray, no worker and no model: the check of ``verl.trainer.main_ppo``,
the trainer's constructor, the look-up of estimators and losses, and the typed configs that workers and rollout make.
"""

import io
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.errors import PaddingError
from verl_padding.job.role_engine import has_critic, has_reference, has_separate_reference, ref_as_actor

EXTERNAL_LIB, AGENT = "actor_rollout_ref.model.external_lib", "actor_rollout_ref.rollout.agent"
LOADED_BY_TRAINER = (
    "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
    "trainer.checkpoint_callback_class",
    f"{AGENT}.agent_loop_manager_class",
)
"""Settings of code of the user's own that the process that trains loads before its first step."""


class CheckJobBeforeStart(Callback):
    """Refuses a job with the ``padding`` group on the command line that cannot run: by ``sys.exit``, with a message on
    stderr and exit code 1, since Hydra turns an exception of a callback into a warning and goes on."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Not on_run_start: values of ``${hydra:..}`` are not known there yet, and a multirun has none.
        try:
            from verl_padding.driver.job_check import check_job

            check_job(config)
            for part, refusal in verl_refusals(config):
                sys.exit(f"verl_padding: {part} refuses this job: {type(refusal).__name__}: {refusal}")
        except PaddingError as refusal:
            sys.exit(f"verl_padding: {refusal}")
        except Exception:
            traceback.print_exc()  # for example, of a config for another trainer; going on would train without padding
            sys.exit("verl_padding: the job could not be checked (see above). Leave +padding out to run it unpadded.")


def verl_refusals(config: DictConfig) -> Iterator[tuple[str, Exception]]:
    """(part of verl, its exception) for each part that refuses the job, which is not changed; none of the plug-in's."""
    for part, check in CHECKS.items():
        try:
            with suppress(PaddingError), redirect_stdout(io.StringIO()):  # verl prints notices
                check(config)
        except Exception as refusal:  # verl raises anything from AssertionError to Hydra's own
            yield part, refusal


def _check_of_main(config: DictConfig) -> None:
    from verl.utils.config import validate_config

    validate_config(config=config, use_reference_policy=has_reference(config), use_critic=has_critic(config))


def _trainer(config: DictConfig) -> None:
    """verl's trainer of the job's mode, without a user-defined trainer, checkpoint callback or sampler: it may ask for
    TransferQueue, which is not there, or make an actor, which would start Ray."""
    from verl_padding.driver.trainers import trainer_of_mode

    config = deepcopy(config)  # verl writes into it
    sampler = config.trainer.v1.sampler
    with open_dict(config):
        config.trainer.checkpoint_callback_class = None
        if (sampler.get("custom_sampler") or {}).get("path"):  # which reads the section of filters by itself
            sampler.custom_sampler = config.algorithm.filter_groups = None
    trainer_of_mode(config)(config=config)._init_resource_pool_mgr()


def _typed_configs(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_teacher_policy
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    if has_separate_reference(config):
        omega_conf_to_dataclass(OmegaConf.create(ref_as_actor(config)))
    if need_teacher_policy(config):
        omega_conf_to_dataclass(config.distillation)


def _estimators_and_losses(config: DictConfig) -> None:
    """Looks names up in verl's registries, unless code that is loaded before may add to these."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    if not any(OmegaConf.select(config, own) for own in (EXTERNAL_LIB, *LOADED_BY_TRAINER)):
        get_adv_estimator_fn(config.algorithm.adv_estimator)
    if not OmegaConf.select(config, EXTERNAL_LIB):
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)


CHECKS: dict[str, Callable[[DictConfig], None]] = {
    "verl's own check": _check_of_main,
    "verl's trainer": _trainer,
    "verl's typed configs": _typed_configs,
    "verl's estimators and losses": _estimators_and_losses,
}
