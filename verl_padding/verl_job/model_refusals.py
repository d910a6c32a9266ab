"""Refuses models, as their configs show them, that do not go with a job's engines, or with shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.plan.transformer_cost import EXPERTS, sliding_layers
from verl_padding.verl_job.engine_refusals import ULYSSES, is_in_veomnis_model, refuse_attention
from verl_padding.verl_job.megatron_refusals import OVERRIDE, overridden
from verl_padding.verl_job.model_cost import rope_by_length, ropes_of, sees_later_tokens
from verl_padding.verl_job.packed_row_refusals import refuse_packed_rows
from verl_padding.verl_job.role_engine import REF_SECTION, RoleEngine

FOLLOW_TOKENS = {True: ("deepseek_v3", "glm4v_moe"), False: ("deepseek_v3", "kimi_k2", "nemotron_h")}
"""Whether a bridge is the vanilla one -> types of models whose experts it gives biases that follow their tokens."""

CRITICS = (("critic", "fsdp"), ("critic", "fsdp2"))
"""Roles whose engines do not read the role's own setting of Ulysses."""
EXCHANGE_THEMSELVES = ("deepseek_v4",)
"""Types of models whose eager attention exchanges tokens for heads between ranks, in VeOmni's code of the model."""


def refuse_model(
    section: str, path: str, model: Mapping[str, Any], engines: Sequence[RoleEngine], padding: PaddingConfig
) -> None:
    """
    Args:
        section: ``actor_rollout_ref`` or ``critic``.
        path: of the model, for messages.
        model: its Hugging Face config, with the job's overrides.
        engines: those that compute it.

    Raises:
        PaddingConfigError: pads or shared prefixes would change its outputs, or an engine does not compute it.
    """
    if padding.sharing != "off" and (rope := rope_by_length(model)):
        raise PaddingConfigError(
            f"padding.sharing={padding.sharing!r}: the model of {section} turns positions by the "
            f"length of the whole input ({rope}), so a row's outputs are not those of a longer "
            "row's first tokens. Set padding.sharing=off."
        )
    if padding.sharing != "off" and (sees := sees_later_tokens(model)):
        raise PaddingConfigError(
            f"padding.sharing={padding.sharing!r}: tokens of the model of {section} see those after them "
            f"({sees}), so what a longer row goes on with would change them. Set padding.sharing=off."
        )
    for engine in engines:
        refuse_packed_rows(engine, model, f"{section}.model.path={path}", padding)
        if engine.strategy == "megatron":
            _refuse_on_megatron(engine, model, f"{section}.model.path={path}")
        elif engine.strategy in ULYSSES and engine.sequence_parallel_size > 1:
            _refuse_on_ulysses(engine, model)


def _refuse_on_megatron(engine: RoleEngine, model: Mapping[str, Any], named: str) -> None:
    if engine.section != REF_SECTION:  # it does not train
        _refuse_biases_that_follow_tokens(engine, model)
        _refuse_copies_of_experts(engine, model)
    if engine.has_scheduler and model.get("vision_config"):
        raise PaddingConfigError(
            f"{engine.section}.megatron.dynamic_context_parallel=True: verl's scheduler does not deal out images, and "
            f"{named} has a vision tower. Set it to False."
        )
    if engine.device == "cpu" and (other := next(_not_plain(engine, model), None)):
        raise PaddingConfigError(
            f"{named}: on a CPU, Megatron's bridge and layers know plain rotary embeddings and plain attention of text "
            f"models, and this one has {other}. Choose another model, or another engine."
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


def n_routed_experts(model: Mapping[str, Any]) -> int:
    """Experts of a layer that its router chooses from; 0 for a dense model."""
    text = model.get("text_config") or model
    return int(next((text[key] for key in EXPERTS if text.get(key)), 0))


def _not_plain(engine: RoleEngine, model: Mapping[str, Any]) -> Iterator[str]:
    """What the vanilla bridge leaves out without a word where transformers is 5, and the layers for a CPU lack."""
    if model.get("vision_config"):
        yield "a vision tower"
    ropes = ropes_of(model)
    for rope in ropes:
        if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
            yield f"rope_type={kind!r}"
    if len(ropes) > 1:
        yield "rotary embeddings for each kind of layer"
    for of_model in (*ropes, model):
        if (part := of_model.get("partial_rotary_factor") or 1) != 1:
            yield f"partial_rotary_factor={part}"
    if sliding_layers(model):
        yield f"sliding_window={model['sliding_window']}"
    if "attention_dropout" not in overridden(engine) and (dropout := model.get("attention_dropout")):
        yield f"attention_dropout={dropout}"


def _refuse_on_ulysses(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    if is_in_veomnis_model(engine) and model.get("model_type") not in EXCHANGE_THEMSELVES:
        refuse_attention(engine)
    text = model.get("text_config") or model
    _refuse_heads(engine, text)
    if engine.device == "cpu":
        _refuse_other_attention(engine, text)


def _refuse_heads(engine: RoleEngine, text: Mapping[str, Any]) -> None:
    """As verl (``apply_monkey_patch``) and VeOmni (``prepare_ulysses_qkv``) assert it in their workers."""
    ranks = engine.sequence_parallel_size
    heads, shared = text.get("num_attention_heads") or 0, text.get("num_key_value_heads") or 0
    fit = {
        "num_attention_heads": lambda size: heads % size == 0,
        "num_key_value_heads": lambda size: shared % size == 0 or size % shared == 0,
    }
    for name, fits in fit.items():
        if not fits(ranks):
            sizes = (size for size in range(ranks - 1, 0, -1) if engine.n_gpus % size == 0)
            size = next(size for size in sizes if all(fits(size) for fits in fit.values()))
            where = f" (critic.fsdp.{ULYSSES['fsdp']})" if (engine.section, engine.strategy) in CRITICS else ""
            raise PaddingConfigError(
                f"{ULYSSES[engine.strategy]}={ranks}: so many ranks share the attention heads of a row of "
                f"{engine.section}, and the model has {name}={text[name]}. Set it{where} to {size}."
            )


def _refuse_other_attention(engine: RoleEngine, text: Mapping[str, Any]) -> None:
    other = f"sliding_window={text['sliding_window']}" if sliding_layers(text) else ""
    if dropout := text.get("attention_dropout"):
        other = f"attention_dropout={dropout}"
    if other:
        raise PaddingConfigError(
            f"{ULYSSES[engine.strategy]}={engine.sequence_parallel_size}: on a CPU, attention with a sliding window or "
            f"dropout has no exchange between the ranks that share a row, and the model of {engine.section} has "
            f"{other}. Set it to 1."
        )
