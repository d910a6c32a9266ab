"""Attention of the segments of a trie: queries are a segment's tokens, keys and values those of its
whole path.

Nothing else of a model knows of the trie, for every other layer computes each token by itself.
transformers' entries for flash attention are wrapped, ours by torch among them; an attention module
whose attribute :data:`TRIE` is set follows that trie. verl's fused forward drops arguments that it
does not know, so the trie is no argument of the model.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.prefix_sharing.prefix_trie import TRIE, Paths, PrefixTrie, make_paths

ENTRIES = ("flash_attention_2", "flash_attention_3")
"""Attentions of transformers that follow a trie, as ours does (``worker/packed_attention.py``)."""


class GatherTokens(torch.autograd.Function):
    """``index_select`` whose backward adds up in float32: in bfloat16, a sum over 128 branches is 1
    % off."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.dim, ctx.shape = dim, states.shape
        return states.index_select(dim, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        (places,) = ctx.saved_tensors
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.shape, dtype=exact).index_add_(
            ctx.dim, places, gradient.to(exact)
        )
        return total.to(gradient.dtype), None, None


def attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The causal attention modules of a model; those that look at images are none."""
    return (
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", False)
    )


@functools.cache
def patch_attention() -> None:
    """Wraps transformers' attentions, and the flash attention inside verl's exchange between
    Ulysses ranks, once a process."""
    from verl.models.transformers import monkey_patch

    _patch([name for name in ENTRIES if name in ALL_ATTENTION_FUNCTIONS], monkey_patch)


@functools.cache
def patch_veomni_attention() -> None:
    """The same for VeOmni's attentions, which have an exchange of their own."""
    from veomni.ops.kernels.attention import flash

    _patch(flash._VEOMNI_FLASH_ATTN_IMPL_MAPPING, flash)


def _patch(names: Iterable[str], module: Any) -> None:
    for name in names:
        ALL_ATTENTION_FUNCTIONS[name] = pass_trie(ALL_ATTENTION_FUNCTIONS[name])
    module._flash_attention_forward = gather_paths(module._flash_attention_forward)


def pass_trie(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``flash_attention_forward``, which passes the trie to
    :func:`gather_paths`."""

    @functools.wraps(attend)
    def attend_with_trie(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trie: PrefixTrie | None = getattr(module, TRIE, None)
        if trie is None:
            return attend(module, *args, **kwargs)
        return attend(module, *args, **kwargs | {TRIE: (trie, id(module))})

    return attend_with_trie


def gather_paths(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``_flash_attention_forward``, which verl calls with all tokens and some of the
    heads.

    Its argument :data:`TRIE` is a trie, and which layer follows it.
    flash-attn from 2.1 on aligns the causal mask of a segment with the end of its path.
    """

    @functools.wraps(attend)
    def attend_to_paths(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (followed := kwargs.pop(TRIE, None)) is None:
            return attend(query, key, value, attention_mask, *args, **kwargs)
        # The segments [5, 6, 7, 9, 9] and [7, 8] have the queries 0 .. 4 and 5 6, and the keys
        # 0 .. 4 and 0 1 5 6.
        trie, layer = followed
        trie.attended.add(layer)
        paths: Paths = trie.cached(make_paths, query.shape[1], query.device)
        kwargs |= {
            "position_ids": None,
            "cu_seq_lens_q": paths.ends_L,
            "cu_seq_lens_k": paths.path_ends_L,
            "max_length_q": max(paths.lengths_L),
            "max_length_k": max(paths.path_lengths_L),
        }
        key, value = (GatherTokens.apply(states, 1, paths.places) for states in (key, value))
        return attend(query, key, value, None, *args, **kwargs)

    return attend_to_paths
