"""Corrections for the rollout that a job asks for and no loss reads.

With ``algorithm.rollout_correction.bypass_mode`` verl's trainer leaves the correction to the actor's loss. But only the
policy loss ``bypass_mode`` corrects, and it reads a section of its own; verl's v1 trainer fills in neither of the two.
"""

from __future__ import annotations

from pathlib import Path

import verl
from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.weighings import BYPASS, LOSS_MODE

OF_LOSS = f"{LOSS_MODE.rpartition('.')[0]}.rollout_correction"
SWITCH = "bypass_mode"


def refuse_lost_correction(config: DictConfig) -> None:
    """
    Raises:
        PaddingConfigError: a setting of the correction that is not verl's default would reach no loss.
    """
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    asked, loss = config.algorithm.get("rollout_correction"), OmegaConf.select(config, LOSS_MODE)
    is_verls = loss in POLICY_LOSS_REGISTRY and POLICY_LOSS_REGISTRY[loss].__module__.startswith("verl.")
    if not asked or not asked.get(SWITCH) or not is_verls:
        return
    read = {**vars(RolloutCorrectionConfig()), **(OmegaConf.select(config, OF_LOSS) or {})} if loss == BYPASS else {}
    defaults = OmegaConf.load(
        Path(verl.__file__).parent / "trainer" / "config" / "algorithm" / "rollout_correction.yaml"
    )
    for name, value in asked.items():
        default = defaults.get(name)
        # As texts: verl takes a threshold as a number or as the text of one.
        if name != SWITCH and str(value) not in (str(default), str(read.get(name, default))):
            raise PaddingConfigError(
                f"algorithm.rollout_correction.{name}={value}: with bypass_mode=True no loss reads it. Set "
                f"{LOSS_MODE}={BYPASS} and +{OF_LOSS}.{name}={value}, or leave it out."
            )
