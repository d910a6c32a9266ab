"""Refuses what Megatron would do in silence: learn from pads, let them take places, or leave gradients out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.model_cost import n_routed_experts
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

BALANCING, BIAS, BIAS_RATE = (
    f"moe_router_{name}" for name in ("load_balancing_type", "enable_expert_bias", "bias_update_rate")
)
FOLLOW_TOKENS = {True: ("deepseek_v3", "glm4v_moe"), False: ("deepseek_v3", "kimi_k2", "nemotron_h")}
"""Whether a bridge is the vanilla one -> types of models whose experts it gives biases that follow their tokens."""


def check_megatron(engine: RoleEngine, padding: PaddingConfig) -> None:
    """Refuses settings with which Megatron would not compute the plan, or pads would count."""
    section = f"{engine.section}.megatron"
    if engine.has_scheduler and (padding.packer == "plan" or padding.is_timed):
        raise PaddingConfigError(
            f"{section}.dynamic_context_parallel=True: verl's scheduler then cuts micro-batches, which neither follows "
            "a plan nor is timed. Set it to False, or padding.packer=verl without timing and measured costs."
        )
    _check_buckets(engine)
    trains = engine.section != REF_SECTION
    for name in _settings_that_count_pads(engine.megatron_override, trains=trains):
        raise PaddingConfigError(
            f"{section}.override_transformer_config.{name}={engine.megatron_override[name]}: routers would count all "
            "tokens of a micro-batch, those of pads among them. Leave it out, as verl does."
        )
    if trains and engine.trains_mtp:
        raise PaddingConfigError(
            f"{engine.model_section}.mtp.enable_train=True: Megatron takes the mean of this loss over all "
            "micro-batches, those of pads alone among them, so pads would make it smaller. Set it to False."
        )


def _check_buckets(engine: RoleEngine) -> None:
    """verl rounds packed rows up to a bucket, by making the last of them longer, and asks no more of that one than that
    context parallel ranks have equally many tokens (``preprocess_thd_engine``): of two chunks that are not as long as
    each other, it drops the end."""
    config = engine.config
    if not (config.pad_to_length and config.use_remove_padding):
        return
    tensor, context = engine.size("tensor"), engine.size("context")
    # The vanilla bridge shares tokens between layers whatever verl's setting is (``mbridge/core/llm_bridge.py``).
    shares_tokens = engine.megatron_override.get(
        "sequence_parallel", config.vanilla_mbridge or config.sequence_parallel
    )
    multiple = tensor if shares_tokens else 1
    if context > 1:
        multiple = context * lcm(multiple, 2)
    bucket = int(config.pad_to_length_bucket)
    if bucket % multiple:
        raise PaddingConfigError(
            f"{engine.section}.megatron.pad_to_length_bucket={bucket}: context and tensor parallel ranks take lengths "
            f"in multiples of {multiple}. Set it to {-(-bucket // multiple) * multiple}."
        )


def _settings_that_count_pads(override: Mapping[str, Any], *, trains: bool) -> Iterator[str]:
    """Settings by which routers count tokens that have no loss, too (Megatron-Core's ``router.py``)."""
    if (override.get("moe_expert_capacity_factor") or 0) > 0:  # experts take so many tokens of a micro-batch
        yield "moe_expert_capacity_factor"
    if not trains:
        return
    kinds, costs = _listed(override.get(BALANCING)), _listed(override.get("moe_aux_loss_coeff"))
    balances = (kinds or costs) and {*kinds} != {"none"} and (not costs or any(costs))
    if balances or "sinkhorn" in kinds:
        yield BALANCING if kinds else "moe_aux_loss_coeff"  # of the type that the bridge has
    if override.get("moe_z_loss_coeff"):
        yield "moe_z_loss_coeff"
    has_bias, rate = override.get(BIAS), override.get(BIAS_RATE)
    if (has_bias or rate) and has_bias is not False and rate != 0:
        yield BIAS if has_bias else BIAS_RATE


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)


def check_megatron_model(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """Refuses a model whose experts' biases would follow pads, or whose gradients would be left out."""
    config, override = engine.config, engine.megatron_override
    if engine.section == REF_SECTION or not n_routed_experts(model):
        return
    rate, kind = override.get(BIAS_RATE), model.get("model_type")
    if kind in FOLLOW_TOKENS[bool(config.vanilla_mbridge)] and rate != 0 and override.get(BIAS) is not False:
        raise PaddingConfigError(
            f"{engine.section}.megatron.override_transformer_config.{BIAS_RATE}={rate}: in a model of type {kind}, "
            "biases of experts would follow the number of their tokens, those of pads among them. Set it to 0."
        )
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and of_expert not in (None, tensor):
        raise PaddingConfigError(  # ``allreduce`` of a weight, in Megatron-Core's layers
            f"{engine.section}.megatron.expert_tensor_parallel_size={of_expert}: with expert_model_parallel_size=1, "
            f"Megatron adds up gradients of experts over tensor_model_parallel_size={tensor} ranks. Set it to {tensor}."
        )
