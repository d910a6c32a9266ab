"""flash-attn's functions by torch alone, for rows that are packed one behind the other.

- Half precision on CUDA: ``torch.nn.attention.varlen`` (torch 2.11 or later), one call a layer;
- anything else: ``scaled_dot_product_attention``, row by row.
"""

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from verl_padding.errors import PaddingError

HALF = (torch.bfloat16, torch.float16)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's function of this name, by torch.

    Args:
        q, k, v: (tokens, heads, head size) of sequences one behind the other; ``k`` and ``v`` may
            have fewer heads.
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,): where the sequences of queries and of
            keys begin and end.
        causal: a query sees no later key; the last query of a sequence is at its last key.
        window_size: keys before and behind its own that a query sees; -1 for all of them.

    Returns: (tokens, heads, head size).

    Raises:
        PaddingError: a soft cap or sinks, without which it is another model: torch has neither.
    """
    if softcap or s_aux is not None:
        raise PaddingError(
            f"attn_implementation=sdpa: softcap={softcap}, sinks={s_aux is not None}: torch's "
            "kernels support neither. Install flash-attn, or set it to eager."
        )
    window = (window_size[0], 0) if causal else window_size
    if has_kernel(q) and not dropout_p:
        from torch.nn.attention import varlen

        # torch 2.11 takes keys of fewer heads as they are.
        is_told = q.shape[1] != k.shape[1] and "enable_gqa" in kernel_settings()
        grouped = {"enable_gqa": True} if is_told else {}
        lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
        return varlen.varlen_attn(
            q, k, v, *lengths, scale=softmax_scale, window_size=window, **grouped
        )
    # Repeated, for with grouped heads and a mask torch keeps all weights; and split, for the
    # gradient of a slice is as long as what it was cut from.
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (states.repeat_interleave(groups, dim=1) for states in (k, v))
    rows = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    return torch.cat([_attend_in_row(*row, window, softmax_scale, dropout_p) for row in rows])


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """flash-attn's function of this name, of sequences of one length: (sequences, tokens, heads,
    head size)."""
    ends = []
    for states in (q, k):
        rows, length = states.shape[:2]
        ends.append(torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device))
    lengths = *ends, q.shape[1], k.shape[1]
    return flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lengths, **kwargs
    ).view_as(q)


def has_kernel(query: torch.Tensor) -> bool:
    """Whether torch's kernel takes these queries: half precision, heads of at most 256, an Ampere
    GPU or later."""
    return (
        query.is_cuda
        and query.dtype in HALF
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device)[0] >= 8
        and "window_size" in kernel_settings()  # from torch 2.11 on
    )


@cache
def kernel_settings() -> tuple[str, ...]:
    """Names of what torch's kernel can be told; none where torch has no such kernel."""
    if find_spec("torch.nn.attention.varlen") is None:
        return ()
    from torch.nn.attention import varlen

    return tuple(inspect.signature(varlen.varlen_attn).parameters)


def _attend_in_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[int, int],
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """(queries, heads, head size), of one row."""
    # Two queries at the end of five keys are at the keys 3 and 4; with one key before its own, the
    # first one sees the keys 2 and 3.
    (n_queries, n_keys), (left, right) = (len(q), len(k)), window
    is_causal, mask = right == 0 and n_queries == n_keys and not 0 <= left < n_keys - 1, None
    if not is_causal and (left >= 0 or right >= 0):
        keys = torch.arange(n_keys, device=q.device)
        distance = keys - keys[n_keys - n_queries :, None]  # of each key from a query's own
        mask = torch.ones_like(distance, dtype=torch.bool)
        if right >= 0:
            mask &= distance <= right
        if left >= 0:
            mask &= distance >= -left
    q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
    )
    return out[0].transpose(0, 1)
