"""Refuses models whose configs show what the probe of packed rows (``worker/leak_probe.py``) is too short to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import refuse_attention
from verl_padding.job.megatron_refusals import refuse_megatron_model
from verl_padding.job.model_cost import rope_by_length
from verl_padding.job.role_engine import RoleEngine

CHOOSES_AMONG_ALL = {"doge": "keep_window_size", "glm_moe_dsa": "index_topk"}
"""Types of models that choose the tokens to attend to among all that are computed -> their setting of how many."""


def refuse_model(named: str, model: Mapping[str, Any], engines: Sequence[RoleEngine], padding: PaddingConfig) -> None:
    """
    Args:
        named: the setting of its path and the path, for messages.
        model: its Hugging Face config, with the job's overrides.
        engines: those that compute it.

    Raises:
        PaddingConfigError: pads or shared prefixes would change its outputs in longer rows than those of the probe.
    """
    if padding.sharing != "off" and (rope := rope_by_length(model)):
        raise PaddingConfigError(
            f"padding.sharing={padding.sharing!r}: {named} turns positions by the length of all that it gets ({rope}), "
            "so a row's outputs are not those of a longer row's beginning. Set padding.sharing=off."
        )
    text = model.get("text_config") or model
    for engine in engines:
        if engine.strategy == "megatron":
            refuse_megatron_model(engine, model)
            continue
        for kind in {str(part.get("model_type")) for part in (model, text)} & CHOOSES_AMONG_ALL.keys():
            key = CHOOSES_AMONG_ALL[kind]
            raise PaddingConfigError(
                f"{named}: this model chooses what a token attends to among all that is computed beside it "
                f"({key}={text.get(key)}), so pads would change what real rows see. Choose another model."
            )
        _refuse_chunks(engine, text, named)
        refuse_attention(engine, str(model.get("model_type")))


def _refuse_chunks(engine: RoleEngine, text: Mapping[str, Any], named: str) -> None:
    """Attention in chunks of all packed tokens, and not of a row's, once a micro-batch is longer than a chunk."""
    size = text.get("attention_chunk_size")
    if not isinstance(size, int) or "chunked_attention" not in (text.get("layer_types") or ()):
        return
    ranks, budgets = engine.sequence_parallel_size, [name for name in engine.settings if "max_token_len" in name]
    longest = max(int(getattr(engine.config, name) or 0) for name in budgets) * ranks
    if engine.config.use_remove_padding and (not engine.config.use_dynamic_bsz or longest > size):
        settings = dict.fromkeys(engine.settings[name] for name in budgets)
        raise PaddingConfigError(
            f"{named}: attention_chunk_size={size} cuts attention over all that is packed, so pads would change what "
            f"real rows see. Set {' and '.join(settings)} to {size // ranks} at most, "
            f"with dynamic batch sizes, or {engine.model_section}.use_remove_padding=False."
        )
