"""Ulysses on a CPU: torch's own attention in the place of flash attention, inside verl's exchange between ranks.

Ranks that share a row each hold a part of its tokens. verl exchanges these for heads before flash attention and back
after it (``monkey_patch.py``), and nothing else does.
"""

from itertools import pairwise
from typing import Any

import torch


def exchange_around_sdpa(monkey_patch: Any) -> None:
    """Leads ``sdpa`` through verl's exchange where ranks share rows, with torch's attention in the middle.

    Args:
        monkey_patch: verl's module of this name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        alone = monkey_patch.get_ulysses_sequence_parallel_world_size() == 1
        # As verl: vision towers pass no position ids, and their ranks share nothing.
        if alone or position_ids is None:
            assert alone or not getattr(module, "is_causal", False), "ranks find the beginning of a row by position ids"
            return sdpa(module, query, key, value, attention_mask, scaling=scaling, position_ids=position_ids, **kwargs)
        assert kwargs.get("sliding_window") is None
        assert not kwargs.get("dropout")
        states = (part.transpose(1, 2).contiguous() for part in (query, key, value))
        exchanged: torch.Tensor = monkey_patch._ulysses_flash_attention_forward(
            *states, None, query.shape[2], position_ids=position_ids.contiguous(), softmax_scale=scaling
        )
        return exchanged, None

    monkey_patch._flash_attention_forward = attention_of_packed_rows
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def attention_of_packed_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    *,
    position_ids: torch.Tensor,
    softmax_scale: float | None,
) -> torch.Tensor:
    """Causal attention of each of the rows that are packed one behind the other.

    Args:
        query, key, value: (1, tokens, heads, size of a head); ``key`` and ``value`` may have fewer heads.
        position_ids: (1, tokens); a row begins at each 0.

    Returns: (1, tokens, heads, size of a head).
    """
    ends = [*(position_ids.flatten() == 0).nonzero().flatten().tolist(), query_length]
    lengths = [end - start for start, end in pairwise(ends)]
    # Not slices: the gradient of each would be as long as all rows together.
    rows = zip(*(states.transpose(1, 2).split(lengths, dim=2) for states in (query, key, value)), strict=True)
    attended = [
        torch.nn.functional.scaled_dot_product_attention(
            *row, is_causal=True, scale=softmax_scale, enable_gqa=query.shape[2] != key.shape[2]
        )
        for row in rows
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()
