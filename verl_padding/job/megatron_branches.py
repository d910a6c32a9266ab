"""With which of Megatron's settings rows that branch share: attention then follows them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from verl_padding.job.model_config import has_latent_attention, has_tower

BRANCH_WITH: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "mrope_section": (None,),
    "experimental_attention_variant": (None,),
    "use_kitchen_attention": (False,),
    "softmax_type": ("vanilla",),
    "attention_dropout": (0.0,),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "fp8_dot_product_attention": (False,),
    "fp8_multi_head_attention": (False,),
    "mtp_num_layers": (None, 0),
    "overlap_moe_expert_parallel_comm": (False,),
    "cuda_graph_impl": ("none",),
    "enable_cuda_graph": (False,),
    "external_cuda_graph": (False,),
}
"""Setting of Megatron's ``TransformerConfig`` -> its values with which rows that branch share."""


def branch_limit(
    settings: Mapping[str, Any],
    model: Mapping[str, Any] = MappingProxyType({}),
    *,
    complete: bool = False,
) -> str | None:
    """Why rows that branch share nothing on Megatron's engine, by its settings and what is known of
    the model's Hugging Face config; None if they may.

    Args:
        complete: whether these are all settings, so that one that is missing is a limit, too.
    """
    for name, admitted in BRANCH_WITH.items():
        value = settings.get(name, "unknown" if complete else admitted[0])
        if value not in admitted:
            return f"Megatron's attention does not follow branches with {name}={value}"
    if has_tower(model) or has_latent_attention(model):
        kind = (model.get("text_config") or model).get("model_type")
        return f"Megatron's attention does not follow branches in model_type={kind}"
    return None
