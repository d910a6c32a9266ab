"""Refuses models, as their configs show them, of which Megatron's engines would learn from pads, or compute no part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_padding.errors import PaddingConfigError
from verl_padding.job.engines_on_cpu import refuse_model_of_megatron_on_a_cpu
from verl_padding.job.megatron_refusals import OVERRIDE, overridden
from verl_padding.job.model_cost import n_routed_experts
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

FOLLOW_TOKENS = {True: ("deepseek_v3", "glm4v_moe"), False: ("deepseek_v3", "kimi_k2", "nemotron_h")}
"""Whether a bridge is the vanilla one -> types of models whose experts it gives biases that follow their tokens."""


def refuse_on_megatron(engine: RoleEngine, model: Mapping[str, Any], named: str) -> None:
    """
    Args:
        model: its Hugging Face config, with the job's overrides.
        named: the setting of its path, with its value.

    Raises:
        PaddingConfigError: pads would change what it learns, or Megatron does not compute it as it is to be cut.
    """
    _refuse_uneven_parts(engine, model)
    _refuse_uneven_stages(engine, model)
    if engine.section != REF_SECTION:  # it does not train
        _refuse_biases_that_follow_tokens(engine, model)
        _refuse_copies_of_experts(engine, model)
        _refuse_experts_without_sequence_parallel(engine, model)
    if engine.has_scheduler and model.get("vision_config"):
        raise PaddingConfigError(
            f"{engine.section}.megatron.dynamic_context_parallel=True: verl's scheduler does not deal out images, and "
            f"{named} has a vision tower. Set it to False."
        )
    if engine.device == "cpu":
        refuse_model_of_megatron_on_a_cpu(named, model, overridden(engine))


def _refuse_uneven_parts(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """As Megatron-Core (``TransformerConfig``, ``VocabUtility``) asserts it in its workers. Megatron-Bridge makes a
    vocabulary larger that does not fit, the vanilla bridge, as verl asks it, does not."""
    ranks = int(engine.config.tensor_model_parallel_size)
    text = model.get("text_config") or model
    counted = {name: text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")}
    sizes = {name: size for name, size in counted.items() if isinstance(size, int) and size > 0}
    fit = {
        "num_attention_heads": lambda of, size: of % size == 0,
        "num_key_value_heads": lambda of, size: of % size == 0 or size % of == 0,
        "vocab_size": lambda of, size: of % size == 0 or not engine.config.vanilla_mbridge,
    }
    for name, size in sizes.items():
        if not fit[name](size, ranks):
            fits = next(
                few for few in engine.sizes_below(ranks) if all(fit[each](of, few) for each, of in sizes.items())
            )
            bridge = name == "vocab_size" and engine.device != "cpu"
            other = f", or {engine.section}.megatron.vanilla_mbridge to False" if bridge else ""
            raise PaddingConfigError(
                f"{engine.section}.megatron.tensor_model_parallel_size={ranks}: so many ranks share the heads and the "
                f"vocabulary of {engine.section}, and the model has {name}={size}. Set it to {fits}{other}."
            )


STAGES_OF_THEIR_OWN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Settings of Megatron's ``TransformerConfig`` by which stages of a pipeline differ."""
LAYERS_BY_PATTERN = ("hybrid_override_pattern", "layers_block_type")
"""Keys of models that Megatron does not cut by ``num_hidden_layers``."""


def _refuse_uneven_stages(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """As Megatron-Core's ``get_num_layers_to_build`` asserts it in its workers."""
    config, override = engine.config, overridden(engine)
    text = model.get("text_config") or model
    layers, pipeline = text.get("num_hidden_layers"), int(config.pipeline_model_parallel_size)
    virtual = int(config.virtual_pipeline_model_parallel_size or 1)
    if any(override.get(name) for name in STAGES_OF_THEIR_OWN) or any(text.get(name) for name in LAYERS_BY_PATTERN):
        return
    if not isinstance(layers, int):
        return
    if pipeline > 1 and layers % (pipeline * virtual):
        name = f"{'virtual_' if layers % pipeline == 0 else ''}pipeline_model_parallel_size"
        smaller = range(virtual - 1, 1, -1) if layers % pipeline == 0 else engine.sizes_below(pipeline)
        others = pipeline if layers % pipeline == 0 else virtual
        fitting = (str(size) for size in smaller if size > 1 and layers % (others * size) == 0)
        fits = next(fitting, "null" if name.startswith("virtual") else "another size")
        stages = f"{pipeline * virtual} stages" + (f" ({pipeline} x {virtual} virtual ones)" if virtual > 1 else "")
        raise PaddingConfigError(
            f"{engine.section}.megatron.{name}={getattr(config, name)}: the {stages} of a pipeline have equally many "
            f"layers, and the model of {engine.section} has num_hidden_layers={layers}. Set it to {fits}, or "
            f"say what the last stage has (+{OVERRIDE.format(engine.section)}.num_layers_in_last_pipeline_stage)."
        )


def _refuse_biases_that_follow_tokens(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """Biases of experts that a bridge turns on by itself; others are refused where they are set."""
    override = overridden(engine)
    rate, kind = override.get("moe_router_bias_update_rate"), model.get("model_type")
    if kind not in FOLLOW_TOKENS[bool(engine.config.vanilla_mbridge)] or not n_routed_experts(model):
        return
    if rate != 0 and override.get("moe_router_enable_expert_bias") is not False:
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.moe_router_bias_update_rate={rate}: in a model of type {kind}, biases "
            "of experts would follow the number of their tokens, those of pads among them. Set it to 0."
        )


def _refuse_copies_of_experts(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """Megatron-Core reduces gradients of experts over their own groups only if ``expert_model_parallel_size`` is more
    than 1 (``allreduce`` of a weight, in its layers and in ``DistributedDataParallel``)."""
    config = engine.config
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and of_expert not in (None, tensor) and n_routed_experts(model):
        raise PaddingConfigError(
            f"{engine.section}.megatron.expert_tensor_parallel_size={of_expert}: with expert_model_parallel_size=1, "
            "Megatron adds gradients of experts up over the ranks that share other weights "
            f"(tensor_model_parallel_size={tensor}), and not over those that share experts. Set it to {tensor}."
        )


def _refuse_experts_without_sequence_parallel(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """As Megatron-Core's ``MoELayer`` refuses it, and in training only, after a first step's passes."""
    ranks = int(engine.config.tensor_model_parallel_size)
    if ranks == 1 or engine.megatron_sequence_parallel or not n_routed_experts(model):
        return
    name = "sequence_parallel"
    override = overridden(engine)
    section = OVERRIDE.format(engine.section) if name in override else f"{engine.section}.megatron"
    raise PaddingConfigError(
        f"{section}.{name}={override.get(name, False)}: with tensor_model_parallel_size={ranks}, Megatron trains "
        "experts only where ranks share the tokens between layers, too. Set it to True."
    )
