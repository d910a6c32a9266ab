"""Refuses models, as their configs show them, that do not go with a job's engines, or with shared prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import ULYSSES, is_in_veomnis_model, refuse_attention
from verl_padding.job.megatron_model_refusals import refuse_on_megatron
from verl_padding.job.model_cost import n_routed_experts, rope_by_length, sees_later_tokens
from verl_padding.job.packed_row_refusals import refuse_packed_rows
from verl_padding.job.role_engine import RoleEngine
from verl_padding.plan.transformer_cost import sliding_layers

CRITICS = (("critic", "fsdp"), ("critic", "fsdp2"))
"""Roles whose engines do not read the role's own setting of Ulysses."""
RANKS_OF_EXPERTS = {"megatron": "expert_model_parallel_size", "veomni": "expert_parallel_size"}
"""Strategy -> its setting of the ranks that experts are dealt out to."""
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
        _refuse_experts_left_over(engine, model)
        if engine.strategy == "megatron":
            refuse_on_megatron(engine, model, f"{section}.model.path={path}")
        elif engine.strategy in ULYSSES and engine.sequence_parallel_size > 1:
            _refuse_on_ulysses(engine, model)


def _refuse_experts_left_over(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """As Megatron-Core's ``BaseMoELayer`` asserts it, and VeOmni's plan of which rank holds what part of a weight."""
    experts = n_routed_experts(model)
    setting = RANKS_OF_EXPERTS.get(engine.strategy)
    if setting and experts and experts % (ranks := int(getattr(engine.config, setting) or 1)):
        raise PaddingConfigError(
            f"{engine.section}.{engine.strategy}.{setting}={ranks}: experts of a layer are dealt out to so many ranks "
            f"evenly, and the model has {experts}. Set it to a divisor of {experts}."
        )


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
    heads, shared = (text.get(f"num_{kind}_heads") or 0 for kind in ("attention", "key_value"))
    if not isinstance(heads, int) or not isinstance(shared, int):  # each layer has its own
        return
    fit = {
        "num_attention_heads": lambda size: heads % size == 0,
        "num_key_value_heads": lambda size: shared % size == 0 or size % shared == 0,
    }
    for name, fits in fit.items():
        if not fits(ranks):
            size = next(size for size in engine.sizes_below(ranks) if all(fits(size) for fits in fit.values()))
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
