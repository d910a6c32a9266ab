"""Refuses adapters (LoRA) that a role's engine does not make, or that never reach the rollout.

Without an adapter, an engine would train the whole model instead.

A job with an adapter has no model for the reference, since verl takes any of the settings below for one that can be
turned off (:func:`~verl_padding.job.roles_of_job.is_lora`).
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import RoleEngine
from verl_padding.job.roles_of_job import is_lora

READS = {"fsdp": "lora_rank", "fsdp2": "lora_rank", "megatron": "lora.rank", "veomni": None}
"""Strategy -> the setting of a model by which the engine makes an adapter; None for an engine that makes none."""
READ_BY_FSDP = "lora_adapter_path"
ASKS = {"lora_rank": "0", "lora.rank": "0", READ_BY_FSDP: "null"}
"""Settings that ask for an adapter -> their value in a job without one."""
MERGE = "actor_rollout_ref.model.lora.merge"


def refuse_adapter(config: DictConfig, engine: RoleEngine) -> None:
    """
    Args:
        config: of the job.

    Raises:
        PaddingConfigError: the model of the engine is to have an adapter, and the engine makes none.
    """
    if engine.strategy not in READS:
        return
    section, reads = engine.model_section, READS[engine.strategy]
    asked = {name: OmegaConf.select(config, f"{section}.{name}") for name in ASKS}
    asked = {name: value for name, value in asked.items() if value not in (0, None)}
    if reads in asked and not (engine.strategy == "megatron" and READ_BY_FSDP in asked):
        return
    for name, value in asked.items():
        fix = f"{section}.{reads} to its rank" if reads else f"it to {ASKS[name]}"
        raise PaddingConfigError(
            f"{section}.{name}={value}: verl's {engine.strategy} engine makes no adapter of it, and would train the "
            f"whole model. Set {fix}."
        )


def refuse_unmerged_adapter(config: DictConfig, mode: str) -> None:
    """
    Args:
        config: of the job.
        mode: verl's, that its trainer extends.

    Raises:
        PaddingConfigError: the rollout would not get the actor's adapter, unless it is merged into the weights.
    """
    if not is_lora(config) or (merges := OmegaConf.select(config, MERGE)):
        return
    if mode == SEPARATE_ASYNC:
        # Its rollout gets what get_per_tensor_param() of an engine gives at first, without what comes beside it.
        raise PaddingConfigError(
            f"{MERGE}={merges}: in {mode}, verl sends the rollout the base model's weights alone, so that it would "
            "never see what is trained. Set it to True."
        )
    if config.trainer.device == "cpu":
        raise PaddingConfigError(
            f"{MERGE}={merges}: rollouts on a CPU take whole weights, no adapters. Set it to True."
        )
