"""Corrections for the rollout that a job asks for and no loss reads.

With ``algorithm.rollout_correction.bypass_mode`` verl's trainer leaves the correction to the actor's loss. But only the
policy loss ``bypass_mode`` corrects, and it reads a section of its own; verl's v1 trainer fills in neither of the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import verl
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.weighings import BYPASS, LOSS_MODE

SECTION = "algorithm.rollout_correction"
OF_LOSS = f"{LOSS_MODE.rpartition('.')[0]}.rollout_correction"
SWITCH = "bypass_mode"


def refuse_lost_correction(config: DictConfig) -> None:
    """
    Raises:
        PaddingConfigError: a setting of the correction that is not verl's default would reach no loss.
    """
    asked_for, loss = OmegaConf.select(config, SECTION), OmegaConf.select(config, LOSS_MODE)
    if not asked_for or not asked_for.get(SWITCH) or not _is_verls(loss):
        return
    verls = Path(verl.__file__).parent / "trainer" / "config" / "algorithm" / "rollout_correction.yaml"
    defaults = OmegaConf.load(verls)
    try:
        reached = (_read_by_loss(config) if loss == BYPASS else None) or {}
    except (ValueError, InstantiationException):  # of which other checks tell
        return
    for name, value in asked_for.items():
        default = defaults.get(name)
        # As texts: verl takes a threshold as a number or as the text of one.
        if name != SWITCH and str(value) not in (str(default), str(reached.get(name, default))):
            raise PaddingConfigError(
                f"algorithm.rollout_correction.{name}={value}: with bypass_mode=True no loss reads it, since "
                f"{LOSS_MODE}={loss}"
                f"{f' reads {OF_LOSS}' if loss == BYPASS else ' corrects for nothing'}. Set {LOSS_MODE}={BYPASS} and "
                f"+{OF_LOSS}.{name}={value}, or leave it out."
            )


def _read_by_loss(config: DictConfig) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss.rollout_correction


def _is_verls(loss: str) -> bool:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    try:
        return bool(get_policy_loss_fn(loss).__module__.startswith("verl."))
    except ValueError:  # verl refuses it, or code that is loaded later brings it
        return False
