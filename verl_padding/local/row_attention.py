"""Attention of packed rows, one by one: transformers' sdpa computes all pairs of tokens of a micro-batch, masked."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend_row_by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' ``sdpa_attention_forward``, for which it stands: the same outputs, but for rounding.

    Args:
        query, key, value: (1, heads, tokens, head size) of a micro-batch of packed rows; others are computed as ever.
        attention_mask: (1, 1, tokens, tokens), by which no token of a row sees one of another row.

    Returns:
        (1, tokens, heads, head size), and None in the place of weights.
    """
    blocks = _blocks(attention_mask, query.shape[2])
    if len(blocks) < 2:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    of_rows = []
    for begin, end, mask in blocks:
        row = (states[:, :, begin:end] for states in (query, key, value))
        of_rows.append(sdpa_attention_forward(module, *row, mask, **kwargs)[0])
    return torch.cat(of_rows, dim=1), None


def _blocks(mask: Tensor | None, tokens: int) -> list[tuple[int, int, Tensor | None]]:
    """Where rows begin and end, found once for all layers, and their masks; None for one that is causal.

    A row begins where a token does not see the one before it. There are none where the mask keeps no rows apart.
    """
    if mask is None or mask.dtype != torch.bool or mask.shape != (1, 1, tokens, tokens):
        return []
    if not hasattr(mask, "blocks_of_rows"):
        begins = [0, *((~mask[0, 0].diagonal(-1)).nonzero().flatten() + 1).tolist()]
        blocks, seen = [], 0
        for begin, end in zip(begins, [*begins[1:], tokens], strict=True):
            own = mask[:, :, begin:end, begin:end]
            seen += int(own.sum())
            blocks.append((begin, end, None if own.equal(torch.ones_like(own).tril()) else own))
        mask.blocks_of_rows = blocks if seen == int(mask.sum()) else []
    return mask.blocks_of_rows
