"""Layers of Megatron-Core with the parameter names of Transformer Engine's, which the bridges to
Hugging Face map.

Megatron-Core itself has local layers for all but three kinds: a norm that is part of the linear
layer behind it, the linear layers of all experts in one module, and attention of packed rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional


def _norm_weight(config, size):
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # its gradient is summed there
    return weight


class RmsNorm(nn.Module):
    """In the place of ``TENorm``."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x):
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class ColumnLinear(ColumnParallelLinear):
    """In the place of ``TEColumnParallelLinear``."""

    def __init__(
        self,
        *args,
        tp_comm_buffer_name=None,
        name=None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)


class RowLinear(RowParallelLinear):
    """In the place of ``TERowParallelLinear``."""

    def __init__(
        self,
        *args,
        tp_comm_buffer_name=None,
        name=None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)


class NormColumnLinear(ColumnLinear):
    """In the place of ``TELayerNormColumnParallelLinear``: the norm is part of the layer."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x, *args, **kwargs):
        x = functional.rms_norm(
            x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon
        )
        return super().forward(x, *args, **kwargs)


class ExpertsLinear(nn.Module):
    """In the place of ``TEColumnParallelGroupedLinear``: weights ``weight0``, ``weight1``, .. of a
    rank's experts."""

    partition_dim = 0
    """Dimension of a weight that expert tensor parallelism splits."""

    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        config,
        pg_collection,
        **_,
    ):
        super().__init__()
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for expert in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            config.init_method(weight.data)
            weight.allreduce = config.expert_model_parallel_size == 1
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = (
                True,
                self.partition_dim,
                1,
            )
            setattr(self, f"weight{expert}", weight)

    def forward(self, x, tokens_E):
        """
        Args:
            x: tokens, sorted by expert, (T, input).
            tokens_E: tokens of each expert.
        """
        parts = x.split([int(tokens) for tokens in tokens_E])
        return torch.cat(
            [functional.linear(part, getattr(self, f"weight{e}")) for e, part in enumerate(parts)]
        ), None


class ExpertsRowLinear(ExpertsLinear):
    """In the place of ``TERowParallelGroupedLinear``."""

    partition_dim = 1


class PackedAttention(DotProductAttention):
    """In the place of ``TEDotProductAttention``: causal attention inside each packed row.

    Context parallel ranks gather each other's keys and values.
    """

    def __init__(self, config, *args, **kwargs):
        # Megatron-Core's own attention refuses context parallelism, which is done below.
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)
        config.context_parallel_size = ranks
        window, skipped = config.window_size, config.window_attn_skip_freq
        is_windowed = is_layer_window_attention(window, skipped, self.layer_number)
        self.window = window[0] if is_windowed else None

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """
        Args:
            query: this rank's tokens of all rows, (T, heads, dim); keys and values have fewer heads
                where queries share them.
            packed_seq_params: where the rows begin, over all context parallel ranks.

        Returns:
            (T, heads x dim).
        """
        # Megatron-Core's own attention hides what a mask marks, and verl marks what is not to be
        # hidden.
        assert packed_seq_params is not None, "use_remove_padding=False"
        padded = packed_seq_params.cu_seqlens_q_padded
        starts = (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
        ranks = parallel_state.get_context_parallel_world_size()
        keys, values = [key], [value]
        if ranks > 1:
            group = parallel_state.get_context_parallel_group()
            keys, values = (
                all_gather(key.contiguous(), group),
                all_gather(value.contiguous(), group),
            )
        rows = []
        for start, end in pairwise(starts):
            here = slice(start // ranks, end // ranks)
            if here.start == here.stop:
                continue
            mask = None
            if ranks > 1 or self.window is not None:
                rank = parallel_state.get_context_parallel_rank()
                mask = _may_see(end - start, ranks, rank, self.window)
            row_qkv = [
                query[here],
                *(_whole_row([part[here] for part in parts]) for parts in (keys, values)),
            ]
            q, k, v = (part.transpose(0, 1)[None] for part in row_qkv)
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


def _whole_row(parts):
    """A row from its parts: of 2 x C chunks, rank r holds chunks r and 2 C - 1 - r.

    Example:
        With two ranks and chunks a, b, c, d, the parts are (a, d) and (b, c): the first halves in
        order, then the second ones backwards.
    """
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


def _may_see(tokens, ranks, rank, window):
    """Which tokens of a row each token of this rank attends to, (tokens / ranks, tokens) bool."""
    own = torch.arange(tokens)
    if ranks > 1:
        chunks = own.chunk(2 * ranks)
        own = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    distance = own[:, None] - torch.arange(tokens)[None]
    return (distance >= 0) & (distance <= (tokens if window is None else window))


class LayersWithoutTransformerEngine(LocalSpecProvider):
    """In the place of ``TESpecProvider``, which says what a layer is built of."""

    linear = None

    def column_parallel_linear(self):
        return ColumnLinear

    def row_parallel_linear(self):
        return RowLinear

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormColumnLinear

    def layer_norm(self, rms_norm=False, for_qk=False):
        return RmsNorm

    def core_attention(self):
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm):
        return TEGroupedMLP, MLPSubmodules(linear_fc1=ExpertsLinear, linear_fc2=ExpertsRowLinear)
