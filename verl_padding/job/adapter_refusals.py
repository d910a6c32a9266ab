"""Refuses adapters (LoRA) that a role's engine does not make, or that never reach the rollout.

Without an adapter, an engine would train the whole model instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import REF_SECTION, RoleEngine
from verl_padding.job.roles_of_job import is_lora

READS = {"fsdp": "lora_rank", "fsdp2": "lora_rank", "megatron": "lora.rank", "veomni": None}
"""Strategy -> the setting of a model by which the engine makes an adapter; None for an engine that makes none."""
PATH = "lora_adapter_path"
"""Setting of an adapter to start from, which Megatron's engine does not read."""
MERGE = "actor_rollout_ref.model.lora.merge"


def refuse_adapters(config: DictConfig, mode: str, engines: Iterable[RoleEngine]) -> None:
    """
    Args:
        mode: verl's, that the job's trainer extends.

    Raises:
        PaddingConfigError: a model is to have an adapter, and its engine makes none, or the rollout does not get it.
    """
    for engine in engines:
        if engine.section == REF_SECTION or engine.strategy not in READS:
            continue
        section, reads = engine.model_section, READS[engine.strategy]
        asked = {name: OmegaConf.select(config, f"{section}.{name}") for name in (PATH, "lora_rank", "lora.rank")}
        asked = {name: value for name, value in asked.items() if value not in (0, None)}
        if asked and (reads not in asked or (engine.strategy == "megatron" and PATH in asked)):
            name = next(name for name in asked if name != reads)
            fix = f" and set {section}.{reads} to the adapter's rank" if reads else ""
            raise PaddingConfigError(
                f"{section}.{name}={asked[name]}: verl's {engine.strategy} engine makes no adapter of it, and would "
                f"train the whole model. Leave it out{fix}."
            )
    if not is_lora(config) or (merges := OmegaConf.select(config, MERGE)):
        return
    if mode == SEPARATE_ASYNC:
        # Its rollout gets what get_per_tensor_param() of an engine gives at first, without what comes beside it.
        why = f"in {mode}, verl sends the rollout the base model's weights alone, without what is trained"
    elif config.trainer.device == "cpu":
        why = "rollouts on a CPU take whole weights, no adapters"
    else:
        return
    raise PaddingConfigError(f"{MERGE}={merges}: {why}. Set it to True.")
