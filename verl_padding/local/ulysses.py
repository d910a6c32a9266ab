"""Ulysses on a CPU: torch's own attention in the place of flash attention, inside verl's exchange between ranks.

Ranks that share a row each hold a part of its tokens. verl exchanges these for heads before flash attention and back
after it (``monkey_patch.py``), and nothing else does; with ``attn_implementation=sdpa`` every rank would attend to its
own part of the row only, without a word.
"""

from itertools import pairwise
from typing import Any

import torch

from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import ULYSSES

STRATEGY_OF_GROUP: dict[Any, str] = {}
"""Process group of ranks that share rows -> its engine's strategy, where that is another than FSDP2. verl's attention
knows the group and not the engine."""


def exchange_around_sdpa(monkey_patch: Any) -> None:
    """Leads ``sdpa`` through verl's exchange where ranks share rows, with torch's attention in the middle.

    Args:
        monkey_patch: verl's module of this name.

    The attention raises a PaddingConfigError where ranks share rows and the model has a sliding window or dropout,
    passes no position ids, or is one whose tokens see later ones.
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
        ranks = monkey_patch.get_ulysses_sequence_parallel_world_size()
        if ranks > 1 and position_ids is None and getattr(module, "is_causal", False):
            raise PaddingConfigError(
                f"{_setting(monkey_patch)}={ranks}: on a CPU, ranks that share a row find its beginning by position "
                f"ids, and {type(module).__name__} passes none to its attention. Set it to 1."
            )
        # As verl: vision towers pass no position ids, and their ranks share nothing.
        if ranks == 1 or position_ids is None:
            out: tuple[torch.Tensor, None] = sdpa(
                module, query, key, value, attention_mask, scaling=scaling, position_ids=position_ids, **kwargs
            )
            return out
        if kwargs.get("sliding_window") is not None or kwargs.get("dropout"):
            raise PaddingConfigError(
                f"{_setting(monkey_patch)}={ranks}: on a CPU, attention with a sliding window or dropout has no "
                "exchange between the ranks that share a row. Set it to 1."
            )
        if not _is_causal(module, kwargs):
            raise PaddingConfigError(
                f"{_setting(monkey_patch)}={ranks}: on a CPU, attention to later tokens of a row has no exchange "
                f"between the ranks that share it, and {type(module).__name__} has is_causal=False. Set it to 1."
            )
        states = (part.transpose(1, 2).contiguous() for part in (query, key, value))
        exchanged: torch.Tensor = monkey_patch._ulysses_flash_attention_forward(
            *states, None, query.shape[2], position_ids=position_ids.contiguous(), softmax_scale=scaling
        )
        return exchanged, None

    monkey_patch._flash_attention_forward = attention_of_packed_rows
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """As transformers reads it for ``sdpa``."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _setting(monkey_patch: Any) -> str:
    return ULYSSES[STRATEGY_OF_GROUP.get(monkey_patch.get_ulysses_sequence_parallel_group(), "fsdp2")]


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
