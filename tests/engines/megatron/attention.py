"""Attention of packed rows for Megatron-Core, by torch; context parallel ranks gather each other's keys and values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.distributed.nn.functional import all_gather
from torch.nn import functional


class PackedAttention(DotProductAttention):
    """In the place of ``TEDotProductAttention``: causal attention inside each packed row."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        # Megatron-Core's own attention refuses context parallelism, which is done below.
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)
        config.context_parallel_size = ranks

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """
        Args:
            query: this rank's tokens of all rows, (T, heads, dim); keys and values have fewer heads where queries
                share them.
            packed_seq_params: where the rows begin, over all context parallel ranks.

        Returns:
            (T, heads x dim).
        """
        # Megatron-Core's own attention hides what a mask marks, and verl marks what is not to be hidden.
        assert packed_seq_params is not None, "use_remove_padding=False"
        padded = packed_seq_params.cu_seqlens_q_padded
        starts = (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
        ranks = parallel_state.get_context_parallel_world_size()
        keys, values = [key], [value]
        if ranks > 1:
            group = parallel_state.get_context_parallel_group()
            keys, values = all_gather(key.contiguous(), group), all_gather(value.contiguous(), group)
        rows = []
        for start, end in pairwise(starts):
            here = slice(start // ranks, end // ranks)
            if here.start == here.stop:
                continue
            mask = None if ranks == 1 else _may_see(end - start, ranks, parallel_state.get_context_parallel_rank())
            of_row = [query[here], *(_whole_row([part[here] for part in parts]) for parts in (keys, values))]
            q, k, v = (part.transpose(0, 1)[None] for part in of_row)
            attended = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
                scale=self.softmax_scale,
            )
            rows.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(rows)


def _whole_row(parts: list[torch.Tensor]) -> torch.Tensor:
    """A row from its parts: of 2 x C chunks, rank r holds chunks r and 2 C - 1 - r.

    Example:
        With two ranks and chunks a, b, c, d, the parts are (a, d) and (b, c): the first halves in order, then the
        second ones backwards.
    """
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


def _may_see(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Which tokens of a row each token of this rank attends to, (tokens / ranks, tokens) bool."""
    chunk = tokens // (2 * ranks)
    places = torch.arange(chunk)
    own = torch.cat([rank * chunk + places, (2 * ranks - 1 - rank) * chunk + places])
    return own[:, None] >= torch.arange(tokens)[None]
