"""Refuses what Megatron would do in silence: learn from pads, let them take places, or leave gradients out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.model_cost import n_routed_experts
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

FOLLOW_TOKENS = {True: ("deepseek_v3", "glm4v_moe"), False: ("deepseek_v3", "kimi_k2", "nemotron_h")}
"""Whether a bridge is the vanilla one -> types of models whose experts it gives biases that follow their tokens."""


def refuse_megatron(engine: RoleEngine, padding: PaddingConfig) -> None:
    """
    Raises:
        PaddingConfigError: Megatron would not compute the plan, or pads would count.
    """
    section = f"{engine.section}.megatron"
    if engine.has_scheduler and (padding.packer == "plan" or padding.is_timed):
        raise PaddingConfigError(
            f"{section}.dynamic_context_parallel=True: verl then cuts micro-batches by a scheduler of its own, which "
            "neither follows a plan nor is timed. Set it to False, or padding.packer=verl, padding.timing=false and "
            "another padding.cost_model than measured."
        )
    _refuse_uneven_buckets(engine)
    trains = engine.section != REF_SECTION
    for name in _settings_that_count_pads(engine.megatron_override, trains=trains):
        raise PaddingConfigError(
            f"{section}.override_transformer_config.{name}={engine.megatron_override[name]}: routers would count all "
            "tokens of a micro-batch, those of pads among them. Leave it out, as verl does."
        )
    if trains and engine.trains_mtp:
        raise PaddingConfigError(
            f"{engine.model_section}.mtp.enable_train=True: Megatron takes the mean of this loss over each micro-batch "
            "and then over all micro-batches, those of pads alone among them, so pads would make it smaller. Set it to "
            "False."
        )


def _refuse_uneven_buckets(engine: RoleEngine) -> None:
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
            f"in multiples of {multiple}, and rows that are rounded up to this may have others. Set it to "
            f"{-(-bucket // multiple) * multiple}."
        )


def _settings_that_count_pads(override: Mapping[str, Any], *, trains: bool) -> Iterator[str]:
    """Settings by which routers count tokens that have no loss, too (Megatron-Core's ``router.py``)."""
    capacity = override.get("moe_expert_capacity_factor")  # experts take so many tokens of a micro-batch
    if capacity is not None and capacity >= 0:
        yield "moe_expert_capacity_factor"
    if not trains:
        return
    balancing = {*_listed(override.get("moe_router_load_balancing_type"))} - {"none"}
    cost = _listed(override.get("moe_aux_loss_coeff"))
    if "sinkhorn" in balancing or (balancing and (not cost or any(cost))):
        yield "moe_router_load_balancing_type"
    if (
        any(cost) and override.get("moe_router_load_balancing_type") is None
    ):  # the bridge's type: "none" for most models
        yield "moe_aux_loss_coeff"
    if override.get("moe_z_loss_coeff"):
        yield "moe_z_loss_coeff"
    has_bias, rate = override.get("moe_router_enable_expert_bias"), override.get("moe_router_bias_update_rate")
    if has_bias and rate != 0:
        yield "moe_router_enable_expert_bias"
    if rate and has_bias is not False:
        yield "moe_router_bias_update_rate"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)


def refuse_megatron_model(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """
    Args:
        model: its Hugging Face config.

    Raises:
        PaddingConfigError: biases of experts would follow pads, or gradients of copied experts be left out.
    """
    config, override = engine.config, engine.megatron_override
    if engine.section == REF_SECTION or not n_routed_experts(model):
        return
    rate, kind = override.get("moe_router_bias_update_rate"), model.get("model_type")
    follows = kind in FOLLOW_TOKENS[bool(config.vanilla_mbridge)]
    if follows and rate != 0 and override.get("moe_router_enable_expert_bias") is not False:
        raise PaddingConfigError(
            f"{engine.section}.megatron.override_transformer_config.moe_router_bias_update_rate={rate}: in a model of "
            f"type {kind}, biases of experts would follow the number of their tokens, those of pads among them. Set it "
            "to 0."
        )
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and of_expert not in (None, tensor):
        raise PaddingConfigError(  # ``allreduce`` of a weight, in Megatron-Core's layers
            f"{engine.section}.megatron.expert_tensor_parallel_size={of_expert}: with expert_model_parallel_size=1, "
            "Megatron adds gradients of experts up over the ranks that share other weights "
            f"(tensor_model_parallel_size={tensor}), and not over those that share experts. Set it to {tensor}."
        )
