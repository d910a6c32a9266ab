"""Tokens that rows share are computed once in verl's Megatron engines.

verl makes everything of a micro-batch in ``forward_step``: labels, temperatures, the packed buffer,
the routes of experts. It gets the segments here, and the rows come back right before the loss. That
is all where rows are full prefixes of others.

Where rows branch, two parts of a model know of the trie: each token is turned by its place in its
row, and attention looks back along its path. The trie goes with Megatron's ``packed_seq_params``,
which reach whatever is computed again in a backward pass: a pipeline has several micro-batches
under way, so "the trie of now" would be that of another.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.nn.functional import all_gather
from verl.utils.device import get_device_id, get_device_name

from verl_padding.prefix_sharing.attention import GatherTokens
from verl_padding.prefix_sharing.engine import (
    BranchesMixedError,
    VerlEngine,
    expand_outputs,
    segments_of,
)
from verl_padding.prefix_sharing.prefix_trie import (
    TRIE,
    PackedPaths,
    PrefixTrie,
    pack_paths,
    trie_of,
)
from verl_padding.prefix_sharing.row_inputs import INPUT_IDS
from verl_padding.worker.varlen_attention import flash_attn_varlen_func

DOES_NOT = "rows that diverge cannot share on Megatron with"
BRANCH_WITH: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "mrope_section": (None,),
    "experimental_attention_variant": (None,),
    "use_kitchen_attention": (False,),
    "softmax_type": ("vanilla",),
    "attention_dropout": (0.0,),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "fp8_dot_product_attention": (False,),
    "fp8_multi_head_attention": (False,),
    "mtp_num_layers": (None, 0),
    "overlap_moe_expert_parallel_comm": (False,),
    "cuda_graph_impl": ("none",),
    "enable_cuda_graph": (False,),
    "external_cuda_graph": (False,),
}
"""Setting of Megatron's ``TransformerConfig`` -> its values with which attention follows paths."""
FOLLOWED = {
    "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention.forward",
}
"""What a core attention computes where attention along paths takes its place."""


class MegatronSharingEngine(VerlEngine):
    """Mixin before one of verl's Megatron engines, whose forward steps get the segments of
    micro-batches with a trie, and whose losses their rows."""

    stock: ClassVar[type]
    module: Any
    tf_config: Any
    _mixes_branches = False
    """Whether a layer of this rank has not followed a trie."""

    @functools.cached_property
    def branch_limit(self) -> str | None:
        """Why rows that branch share nothing, by Megatron's settings and layers; None if they may.

        All ranks ask at once, before any trie: a limit of one stage is that of all.
        """
        if get_device_name() == "npu":
            return f"{DOES_NOT} an NPU"
        own = [limit_of_settings(self.tf_config), *map(limit_of_stage, self.module)]
        limits: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(limits, next(filter(None, own), None))
        return next(filter(None, limits), None)

    def initialize(self) -> None:
        super().initialize()
        self._follow_paths = functools.cache(follow_paths)  # once a stage of this model

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._mixes_branches = False
        answer = super().forward_backward_batch(*args, **kwargs)
        # Not before: the other ranks of a pipeline would wait for this one.
        if self._mixes_branches:
            raise BranchesMixedError(
                f"padding.sharing='on': layers of {self.stock.__name__} mix rows that "
                "diverge. Set padding.sharing=off."
            )
        return answer

    def forward_step(
        self, batch_iter: Iterator[TensorDict], model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        rows = next(batch_iter)
        if (trie := trie_of(rows)) is None:
            return super().forward_step(iter([rows]), model, *args, **kwargs)
        segments, step = iter([segments_of(rows, trie)]), super().forward_step
        if not trie.has_branches:
            output, postprocess = step(segments, model, *args, **kwargs)
        else:
            self._follow_paths(model)
            gpt = language_model(model)
            hook = functools.partial(with_trie, gpt, trie)
            with gpt.decoder.register_forward_pre_hook(hook, with_kwargs=True):
                output, postprocess = step(segments, model, *args, **kwargs)
            attended = [id(core) in trie.attended for core in core_attentions(model)]
            self._mixes_branches |= not all(attended)
        # The last stage calls it with an output; verl has put the segments into it.
        return output, functools.partial(postprocess, data=rows.to(get_device_id()))

    def prepare_model_outputs(self, output: Any, data: TensorDict) -> dict[str, Any]:
        outputs: dict[str, Any] = super().prepare_model_outputs(output, data)
        if (trie := trie_of(data)) is None:
            return outputs
        return expand_outputs(self, outputs, trie, data[INPUT_IDS].offsets())


def language_model(model: nn.Module) -> Any:
    """The GPTModel of a stage, inside of what wraps it; None for a model of another kind."""
    from megatron.core.models.gpt import GPTModel

    return next((part for part in model.modules() if isinstance(part, GPTModel)), None)


def core_attentions(model: nn.Module) -> list[Any]:
    """The core attention of each layer of a stage whose layers follow tries."""
    return [layer.self_attention.core_attention for layer in language_model(model).decoder.layers]


def limit_of_settings(config: Any) -> str | None:
    """Why rows that branch share nothing, by a ``TransformerConfig``; None if they may."""
    for name, admitted in BRANCH_WITH.items():
        if (value := getattr(config, name, "unknown")) not in admitted:
            return f"{DOES_NOT} {name}={value}"
    return None


def limit_of_stage(model: nn.Module) -> str | None:
    """Why rows that branch share nothing, by the layers of a stage whose attention has not been
    replaced yet; None if they may."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_block import TransformerBlock

    gpt = language_model(model)
    if gpt is None or type(gpt.decoder) is not TransformerBlock:
        return f"{DOES_NOT} {type(model if gpt is None else gpt.decoder).__name__}"
    turns = getattr(gpt, "rotary_pos_emb", None)
    if type(turns) not in (type(None), RotaryEmbedding, YarnRotaryEmbedding):
        return f"{DOES_NOT} rotary_pos_emb={type(turns).__name__}"
    for layer in gpt.decoder.layers:
        attention = getattr(layer, "self_attention", layer)
        core: Any = getattr(attention, "core_attention", None)
        if type(attention) is not SelfAttention or not hasattr(core, "config"):
            return f"{DOES_NOT} {type(attention).__name__}"
        attend = type(core).forward
        name = f"{attend.__module__}.{attend.__qualname__}"
        if name not in FOLLOWED or hasattr(attend, "__wrapped__") or "forward" in vars(core):
            return f"{DOES_NOT} core_attention={type(core).__name__} and another forward"
        # Transformer Engine's has a text of its own, and gets that of the layer.
        mask, own = attention.attn_mask_type.name, core.attn_mask_type
        if "causal" not in mask or "causal" not in getattr(own, "name", own):
            return f"{DOES_NOT} attn_mask_type={mask}"
        if limit := limit_of_settings(core.config):
            return limit
    return None


def follow_paths(model: nn.Module) -> None:
    """Has the attention of a stage's layers follow tries that it gets."""
    for core in core_attentions(model):
        core.forward = along_paths(core, core.forward)


def with_trie(gpt: Any, trie: PrefixTrie, _: Any, args: Any, given: dict[str, Any]) -> Any:
    """What a decoder gets, with the trie: to rotary embeddings, fused or not, the buffer is one
    sequence whose tokens have frequencies of their own."""
    from megatron.core import parallel_state

    packed = given["packed_seq_params"]
    ends = packed.cu_seqlens_q_padded
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    paths: PackedPaths = trie.cached(pack_paths, tuple(ends.tolist()), ranks, rank, ends.device)
    if given.get("rotary_pos_emb") is not None:
        given["rotary_pos_emb"] = rotary_frequencies(gpt, paths, ranks, rank)
    tokens = len(paths.positions) * ranks
    whole = ends.new_tensor([0, tokens])
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    lengths = {"max_seqlen_q": tokens, "max_seqlen_kv": tokens}
    one_sequence = dataclasses.replace(packed, **dict.fromkeys(names, whole), **lengths)
    setattr(one_sequence, TRIE, (trie, paths))
    return args, given | {"packed_seq_params": one_sequence}


def rotary_frequencies(gpt: Any, paths: PackedPaths, ranks: int, rank: int) -> torch.Tensor:
    """Of each token of the buffer by its place in its row, (T, 1, 1, D); with context parallelism,
    of this rank's tokens, where those of one sequence would be."""
    made = gpt.rotary_pos_emb(max(paths.path_lengths_L), packed_seq=True)
    by_place = made[0] if isinstance(made, tuple) else made  # YaRN's come with a factor
    by_token: torch.Tensor = by_place[paths.positions]
    if ranks == 1:
        return by_token
    chunks = by_token.new_zeros(2 * ranks, len(by_token) // 2, *by_token.shape[1:])
    chunks[rank], chunks[2 * ranks - 1 - rank] = by_token.chunk(2)
    return chunks.flatten(0, 1)


def along_paths(core: Any, attend: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's core attention, which looks back along the paths of a trie where there is one:
    queries (tokens, heads, size), keys and values -> (tokens, heads x size)."""
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import is_layer_window_attention

    config = core.config
    scale, window = config.softmax_scale, config.window_size
    settings = {
        "softmax_scale": config.kv_channels**-0.5 if scale is None else scale,
        "causal": True,
    }
    if is_layer_window_attention(window, config.window_attn_skip_freq, core.layer_number):
        settings["window_size"] = tuple(window)

    @functools.wraps(attend)
    def attend_along_paths(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        followed = getattr(kwargs.get("packed_seq_params"), TRIE, None)
        if followed is None:
            return attend(query, key, value, *args, **kwargs)
        trie, paths = followed
        trie.attended.add(id(core))
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (torch.cat(all_gather(each.contiguous(), group)) for each in (key, value))
        key, value = (GatherTokens.apply(states, 0, paths.places) for states in (key, value))
        longest = max(paths.lengths_L), max(paths.path_lengths_L)
        return flash_attn_varlen_func(
            query, key, value, paths.ends_L, paths.path_ends_L, *longest, **settings
        ).flatten(1)

    return attend_along_paths
