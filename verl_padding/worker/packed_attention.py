"""Attention of rows that are packed one behind the other, by torch alone: no pair of tokens of two
rows is computed.

transformers gives packed rows to flash-attn's ``flash_attn_varlen_func``, or to sdpa with a mask
of all pairs of their tokens. The attention :data:`PACKED` takes the way of flash-attn (ends of rows
from position ids, sliding windows, verl's exchange between Ulysses ranks), at whose end there are
torch's own kernels (``varlen_attention.py``). It takes the place of sdpa, by which models are
loaded where flash-attn is not installed, if their masks are causal.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.job.attention import PACKED
from verl_padding.prefix_sharing.attention import attention_layers, pass_trie
from verl_padding.prefix_sharing.linear_attention import linear_layers
from verl_padding.worker.varlen_attention import flash_attn_func, flash_attn_varlen_func

CAUSAL_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Types of layers whose masks :data:`PACKED` can do without."""
BY_VERL = ("verl.models.transformers.qwen2_vl", "verl.models.transformers.glm4v")
"""Modules with an attention of verl's own, whose names come from flash-attn alone."""


def patch_attention_of(engine: Any) -> None:
    """Gives the model of an FSDP engine that packs rows :data:`PACKED`, and linear attention that
    keeps rows apart.

    Raises:
        PaddingConfigError: Ulysses ranks share rows, and the model's attention does not exchange
            their tokens.
    """
    config, model = engine.engine_config, engine.module
    if not (config.strategy.startswith("fsdp") and config.use_remove_padding):
        return
    use_packed_attention(model)
    # verl 0.9 and transformers 5 tell linear layers where rows begin for Qwen3.5's language models
    # with a vision tower, on GPUs with fla; in Qwen3-Next, in a Qwen3.5 of text alone, in critics
    # and on CPUs, a row goes on from the row before it. Ulysses ranks share rows by fla's own
    # exchange, or see each other, as the probe finds.
    if (ranks := config.ulysses_sequence_parallel_size) == 1:
        engine.keep_rows_apart()
    elif model.config.get_text_config()._attn_implementation == "sdpa":
        raise PaddingConfigError(
            f"ulysses_sequence_parallel_size={ranks}: {type(model).__name__} has attention in "
            "which verl exchanges no tokens. Install flash-attn, or set it to 1."
        )
    elif any(linear_layers(model)):
        engine.branch_limit = "Ulysses ranks exchange states of linear attention between rows"


def use_packed_attention(model: nn.Module) -> None:
    """Puts :data:`PACKED` in the place of sdpa; a model with an attention of its own keeps what it
    has.

    Towers that look at images keep theirs, too: an image is attended to by itself.
    """
    text: Any = model.config.get_text_config()
    layers = list(attention_layers(model))
    verl_modules = [
        module
        for module in map(sys.modules.get, BY_VERL)
        if module and any(_names(layer) is vars(module) for layer in layers)
    ]
    if (
        text._attn_implementation == "sdpa"
        and layers
        and CAUSAL_LAYERS.issuperset(getattr(text, "layer_types", None) or ())
        and not getattr(text, "attn_logit_softcapping", None)
        and (verl_modules or all("ALL_ATTENTION_FUNCTIONS" in _names(layer) for layer in layers))
    ):
        register_packed_attention()
        for module in verl_modules:
            _bring_kernels(module)
        text._attn_implementation = PACKED


def _names(layer: nn.Module) -> dict[str, Any]:
    """What a layer's forward pass knows by name: transformers' table of attentions, if it attends
    by that."""
    return inspect.unwrap(layer.forward).__globals__


def _bring_kernels(module: Any) -> None:
    """Brings verl's attention of a family of vision models what it imports from flash-attn
    alone."""
    if hasattr(module, "flash_attn_varlen_func"):
        return
    attend = module._flash_attention_forward

    @wraps(attend)
    def without_mask(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # One row: nothing is padded.
        return attend(q, k, v, None, *args, attn_implementation=PACKED, **kwargs)

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module._flash_attention_forward = without_mask
    module._flash_supports_window_size, module._flash_supports_deterministic = True, False
    module._flash_use_top_left_mask = False


def register_packed_attention() -> None:
    """Makes :data:`PACKED` a choice of transformers'."""
    if PACKED in ALL_ATTENTION_FUNCTIONS:
        return
    ALL_ATTENTION_FUNCTIONS.register(PACKED, pass_trie(attend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, positions_unless_masked)
    find_functions = modeling_flash_attention_utils._lazy_imports

    @wraps(find_functions)
    def find_ours(
        implementation: str | None, *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Any] | None, ...]:
        if implementation != PACKED:
            return find_functions(implementation, *args, **kwargs)
        module = modeling_flash_attention_utils
        pads = module._pad_input, module._unpad_input
        return flash_attn_func, flash_attn_varlen_func, None, *pads

    # transformers looks for these functions in packages and on its hub; it has no registry for
    # them.
    modeling_flash_attention_utils._lazy_imports = find_ours


def positions_unless_masked(
    *, mask_function: Callable[..., Any], use_vmap: bool = False, **given: Any
) -> Any:
    """transformers' mask interface, of packed rows: int32 (1, tokens), each token's place in its
    row.

    Rows [a, b, c] and [d, e] have [0, 1, 2, 0, 1]. Where tokens see later ones, as those of an
    image may, it is the mask of all pairs that sdpa gets, and of rows side by side what flash-attn
    gets.
    """
    length, device = given["q_length"], given["device"]
    zero, at = torch.zeros((), dtype=torch.long, device=device), torch.arange(length, device=device)
    # Tokens that see each other lie side by side, so that the pairs of neighbours tell.
    if use_vmap or bool(torch.as_tensor(mask_function(zero, zero, at[:-1], at[1:])).any()):
        return sdpa_mask(mask_function=mask_function, use_vmap=use_vmap, **given)
    if given["batch_size"] > 1 or given.get("attention_mask") is not None:
        return flash_attention_mask(mask_function=mask_function, **given)
    goes_on = torch.as_tensor(mask_function(zero, zero, at[1:], at[:-1])).expand(length - 1)
    begins = torch.cat([at[:1], at[1:].masked_fill(goes_on, 0)]).cummax(0).values
    return (at - begins).to(torch.int32)[None]


def _has_window(module: nn.Module) -> bool:
    """Whether a layer of attention sees a part of the tokens before it alone, by its config."""
    config: Any = module.config
    types = getattr(config, "layer_types", None)
    is_sliding = types is None or types[module.layer_idx] == "sliding_attention"
    # transformers' Qwen2-MoE says 0 where no layer has one.
    return is_sliding and bool(getattr(config, "sliding_window", None))


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, heads, tokens, head size) -> (1, tokens, heads, head
    size), None."""
    if attention_mask is not None and attention_mask.ndim == 4:
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal} | kwargs
        masked: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return masked
    if "sliding_window" not in kwargs and _has_window(module):
        raise PaddingError(
            f"attn_implementation=sdpa: {type(module).__name__} has its sliding window only in a "
            "mask. Set override_config.attn_implementation=eager, with padding.sharing=off."
        )
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        if kwargs.get("position_ids") is None:  # some layers do not hand them on
            kwargs["position_ids"] = attention_mask
        attention_mask = None
    # Not by ``flash_attention_forward``, which would have half precision of what is in float32.
    attended: torch.Tensor = flash_attention._flash_attention_forward(
        *(states.transpose(1, 2) for states in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        attn_implementation=PACKED,
        **kwargs,
    )
    return attended, None
