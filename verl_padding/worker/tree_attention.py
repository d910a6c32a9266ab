"""Attention of the segments of a tree: queries are a segment's tokens, keys and values those of its whole path.

Nothing else of a model knows of the tree, for every other layer computes each token by itself. transformers' entries
for sdpa and flash attention are wrapped; an attention module whose attribute :data:`TREE` is set follows that tree.
verl's fused forward drops arguments that it does not know, so the tree is no argument of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingError
from verl_padding.worker.prefix_tree import TREE, PrefixTree

ENTRIES = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attentions that follow a tree."""
ANY_MASK = torch.empty(1, 1, 0, 0)
"""In the place of a mask, which nothing reads: transformers passes on one of four dimensions, and would make all pairs
of tokens otherwise."""


def attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The causal attention modules of a model; those that look at images are none."""
    return (
        module for module in model.modules() if hasattr(module, "layer_idx") and getattr(module, "is_causal", False)
    )


class GatherTokens(torch.autograd.Function):
    """``index_select`` whose backward adds up in float32: in bfloat16, a sum over 128 branches is 1 % off."""

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
        total = gradient.new_zeros(ctx.shape, dtype=exact).index_add_(ctx.dim, places, gradient.to(exact))
        return total.to(gradient.dtype), None, None


def follow_trees() -> None:
    """Wraps transformers' attentions, and the flash attention inside verl's exchange between Ulysses ranks."""
    for name in ENTRIES:
        attend = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(attend, TREE):
            ALL_ATTENTION_FUNCTIONS[name] = (follow_by_sdpa if name == "sdpa" else follow_by_flash)(attend)


def follow_by_sdpa(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``sdpa_attention_forward``, segment by segment where there is a tree."""

    @functools.wraps(attend)
    def attend_to_paths(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        tree: PrefixTree | None = getattr(module, TREE, None)
        if tree is None:
            attended: tuple[torch.Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
            return attended
        paths = tree.paths(query.shape[2], query.device)
        parts_S = zip(
            query.split(paths.lengths_S, dim=2),
            GatherTokens.apply(key, 2, paths.places).split(paths.path_lengths_S, dim=2),
            GatherTokens.apply(value, 2, paths.places).split(paths.path_lengths_S, dim=2),
            strict=True,
        )
        tree.attended.add(id(module))
        # A model that hands its attention no window, not even None, has it in the mask, which is left out here.
        if "sliding_window" not in kwargs and getattr(module.config, "sliding_window", None) is not None:
            raise PaddingError(
                f"padding.sharing='trees': {type(module).__name__} has a sliding window in its mask alone, which rows "
                "that part do not see. Set padding.sharing=chains."
            )
        window = kwargs.pop("sliding_window", None)
        return torch.cat(
            [sdpa_attention_forward(module, q, k, v, _mask(q, k, window), **kwargs)[0] for q, k, v in parts_S], dim=1
        ), None

    setattr(attend_to_paths, TREE, True)
    return attend_to_paths


def _mask(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Which keys (queries, keys) the last queries of a path see; None where each sees all up to its own."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    if n_queries == n_keys and (window is None or window >= n_keys):
        return None
    at = torch.arange(n_keys, device=query.device)
    seen = at <= at[n_keys - n_queries :, None]
    return seen if window is None else seen & (at > at[n_keys - n_queries :, None] - window)


def follow_by_flash(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``flash_attention_forward``, which hands the tree on to :func:`gather_paths`."""

    @functools.wraps(attend)
    def attend_with_tree(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tree: PrefixTree | None = getattr(module, TREE, None)
        if tree is None:
            return attend(module, *args, **kwargs)
        return attend(module, *args, **kwargs | {TREE: (tree, id(module))})

    setattr(attend_with_tree, TREE, True)
    return attend_with_tree


def gather_paths(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``_flash_attention_forward``, which verl calls with all tokens and some of the heads.

    Its argument :data:`TREE` is a tree, and which layer follows it.
    flash-attn from 2.1 on aligns the causal mask of a segment with the end of its path.
    """

    @functools.wraps(attend)
    def attend_to_paths(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        query_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (followed := kwargs.pop(TREE, None)) is None:
            return attend(query, key, value, attention_mask, query_length, *args, **kwargs)
        tree, layer = followed
        tree.attended.add(layer)
        paths = tree.paths(query.shape[1], query.device)
        kwargs |= {
            "position_ids": None,
            "cu_seq_lens_q": paths.ends_S,
            "cu_seq_lens_k": paths.path_ends_S,
            "max_length_q": max(paths.lengths_S),
            "max_length_k": max(paths.path_lengths_S),
        }
        key, value = GatherTokens.apply(key, 1, paths.places), GatherTokens.apply(value, 1, paths.places)
        return attend(query, key, value, None, query_length, *args, **kwargs)

    setattr(attend_to_paths, TREE, True)
    return attend_to_paths
