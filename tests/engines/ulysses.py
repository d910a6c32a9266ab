"""Ulysses on a CPU: torch's own attention in the place of flash attention, inside verl's exchange between ranks.

Ranks that share a row each hold a part of its tokens. verl exchanges these for heads before flash attention and back
after it (``monkey_patch.py``), and nothing else does.
"""

from typing import Any

import torch

from verl_padding.worker.prefix_tree import TREE
from verl_padding.worker.tree_attention import follow_by_sdpa, gather_paths


def exchange_around_sdpa(monkey_patch: Any) -> None:
    """Leads ``sdpa`` through verl's exchange where ranks share rows, with torch's attention in the middle.

    Args:
        monkey_patch: verl's module of this name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = follow_by_sdpa(ALL_ATTENTION_FUNCTIONS["sdpa"])

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
        tree = getattr(module, TREE, None)
        alone = monkey_patch.get_ulysses_sequence_parallel_world_size() == 1
        # As verl: vision towers pass no position ids, and their ranks share nothing.
        if alone or position_ids is None:
            assert alone or not getattr(module, "is_causal", False), "ranks find the beginning of a row by position ids"
            return sdpa(module, query, key, value, attention_mask, scaling=scaling, position_ids=position_ids, **kwargs)
        assert kwargs.get("sliding_window") is None
        assert not kwargs.get("dropout")
        states = (part.transpose(1, 2).contiguous() for part in (query, key, value))
        shared = {}
        if tree is not None:
            shared[TREE] = tree, id(module)
        exchanged: torch.Tensor = monkey_patch._ulysses_flash_attention_forward(
            *states, None, query.shape[2], position_ids=position_ids.contiguous(), softmax_scale=scaling, **shared
        )
        return exchanged, None

    monkey_patch._flash_attention_forward = gather_paths(attention_of_packed_rows)
    setattr(attention, TREE, True)  # trees are followed in here
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def attention_of_packed_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    *,
    position_ids: torch.Tensor | None,
    softmax_scale: float | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **_lengths: int,
) -> torch.Tensor:
    """Causal attention of each of the rows that are packed one behind the other.

    Args:
        query, key, value: (1, tokens, heads, size of a head); ``key`` and ``value`` may have fewer heads.
        position_ids: (1, tokens); a row begins at each 0.
        cu_seq_lens_q, cu_seq_lens_k: where rows of queries, and of their keys, begin and end; as flash attention does,
            the last query sees all keys.

    Returns: (1, tokens, heads, size of a head).
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        assert position_ids is not None
        starts = (position_ids.flatten() == 0).nonzero().flatten()
        cu_seq_lens_q = cu_seq_lens_k = torch.nn.functional.pad(starts, (0, 1), value=query_length)
    lengths_q, lengths_k = cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist()
    # Not slices: the gradient of each would be as long as all rows together.
    rows = zip(
        query.transpose(1, 2).split(lengths_q, dim=2),
        *(states.transpose(1, 2).split(lengths_k, dim=2) for states in (key, value)),
        strict=True,
    )
    attended = []
    for q, k, v in rows:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        attended.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=query.shape[2] != key.shape[2]
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()
