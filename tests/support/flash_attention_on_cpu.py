"""flash-attn's documented semantics on a CPU: a reference, not fast.

The causal mask of queries that are fewer than their keys is aligned with the last key (flash-attn
2.1 and later).
"""

from itertools import pairwise

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """(tokens, heads, head size) of queries, from packed sequences of queries and of keys and
    values."""
    assert dropout_p == 0.0
    attended = []
    for (q_from, q_to), (k_from, k_to) in zip(
        pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        assert 0 < q_to - q_from <= max_seqlen_q
        assert k_to - k_from <= max_seqlen_k
        query, key, value = (
            x.transpose(0, 1) for x in (q[q_from:q_to], k[k_from:k_to], v[k_from:k_to])
        )
        groups, n_keys = len(query) // len(key), key.shape[1]
        at, to = torch.arange(n_keys - query.shape[1], n_keys)[:, None], torch.arange(n_keys)
        left, right = window_size[0], 0 if causal else window_size[1]
        seen = (to <= at + right if right >= 0 else to >= 0) & (
            to >= at - left if left >= 0 else to >= 0
        )
        scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2)
        scores = scores * (softmax_scale or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        attended.append((weights @ value.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(attended)
