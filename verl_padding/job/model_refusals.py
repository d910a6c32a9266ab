"""Refuses models whose configs show what the probe of packed rows (``worker/leak_probe.py``) is too short to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import OVERRIDE, is_in_veomnis_model, overridden, refuse_attention
from verl_padding.job.model_cost import n_routed_experts, rope_by_length
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

EXCHANGE_THEMSELVES = ("deepseek_v4",)
"""Types of models whose eager attention exchanges tokens for heads between ranks, in VeOmni's code of the model."""
CHOOSES_AMONG_ALL = {"doge": "keep_window_size", "glm_moe_dsa": "index_topk"}
"""Types of models that choose the tokens to attend to among all that are computed -> their setting of how many."""
FOLLOW_TOKENS = {True: ("deepseek_v3", "glm4v_moe"), False: ("deepseek_v3", "kimi_k2", "nemotron_h")}
"""Whether a bridge is the vanilla one -> types of models whose experts it gives biases that follow their tokens."""


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
        PaddingConfigError: pads or shared prefixes would change its outputs in longer rows than those of the probe.
    """
    named = f"{section}.model.path={path}"
    if padding.sharing != "off" and (rope := rope_by_length(model)):
        raise PaddingConfigError(
            f"padding.sharing={padding.sharing!r}: the model of {section} turns positions by the length of the whole "
            f"input ({rope}), so a row's outputs are not those of a longer row's beginning. Set padding.sharing=off."
        )
    text = model.get("text_config") or model
    for engine in engines:
        if engine.strategy == "megatron":
            _refuse_on_megatron(engine, model)
            continue
        for kind in {str(part.get("model_type")) for part in (model, text)} & CHOOSES_AMONG_ALL.keys():
            key = CHOOSES_AMONG_ALL[kind]
            raise PaddingConfigError(
                f"{named}: this model chooses what a token attends to among all that is computed beside it "
                f"({key}={text.get(key)}), so pads would change what real rows see. Choose another model."
            )
        _refuse_chunks(engine, text, named)
        if is_in_veomnis_model(engine) and model.get("model_type") not in EXCHANGE_THEMSELVES:
            refuse_attention(engine)


def _refuse_chunks(engine: RoleEngine, text: Mapping[str, Any], named: str) -> None:
    """Attention in chunks of all packed tokens, and not of a row's, once a micro-batch is longer than a chunk."""
    size = text.get("attention_chunk_size")
    if not isinstance(size, int) or "chunked_attention" not in (text.get("layer_types") or ()):
        return
    fields = [name for name in ("max_token_len_per_gpu", "infer_max_token_len_per_gpu") if name in engine.settings]
    budgets = {engine.settings[name]: int(getattr(engine.config, name) or 0) for name in fields}
    longest = max(budgets.values(), default=0) * engine.sequence_parallel_size
    if engine.config.use_remove_padding and (not engine.config.use_dynamic_bsz or longest > size):
        raise PaddingConfigError(
            f"{named}: attention_chunk_size={size} cuts attention over all that is packed, so pads would change what "
            f"real rows see. Set {' and '.join(budgets)} to {size // engine.sequence_parallel_size} at most, with "
            f"dynamic batch sizes, or {engine.model_section}.use_remove_padding=False."
        )


def _refuse_on_megatron(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    config, override = engine.config, overridden(engine)
    if engine.section == REF_SECTION or not n_routed_experts(model):
        return
    rate, kind = override.get("moe_router_bias_update_rate"), model.get("model_type")
    follows = kind in FOLLOW_TOKENS[bool(config.vanilla_mbridge)]
    if follows and rate != 0 and override.get("moe_router_enable_expert_bias") is not False:
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.moe_router_bias_update_rate={rate}: in a model of type {kind}, biases "
            "of experts would follow the number of their tokens, those of pads among them. Set it to 0."
        )
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and of_expert not in (None, tensor):
        raise PaddingConfigError(  # ``allreduce`` of a weight, in Megatron-Core's layers
            f"{engine.section}.megatron.expert_tensor_parallel_size={of_expert}: with expert_model_parallel_size=1, "
            "Megatron adds gradients of experts up over the ranks that share other weights "
            f"(tensor_model_parallel_size={tensor}), and not over those that share experts. Set it to {tensor}."
        )
