"""Linear attention along the paths of a trie: a gated delta rule behind a causal convolution, as in
Qwen3.5 and Qwen3-Next.

Such a layer mixes tokens by two callables alone, which transformers puts on the instance:
``causal_conv1d_fn`` and ``chunk_gated_delta_rule``. Both are wrapped; a layer whose attribute
:data:`TRIE` is set follows that trie. Forward methods, verl's or transformers', stay as they are.

The convolution reads each segment behind the tokens before it on its path. The rule carries a
state from token to token: segments are cut into *pieces* where others branch off, and each piece
begins in the state in which the one before it on its path ends. A segment begins with a copy of the
last shared token, so others branch off before that token, and each path counts it once.

A trie without branches is rows one behind the other, so packed rows do not see each other either,
which stock verl 0.9 and transformers leave out for some models and devices.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from verl_padding.plan.cost import Int64s
from verl_padding.prefix_sharing.attention import GatherTokens
from verl_padding.prefix_sharing.prefix_trie import TRIE, PrefixTrie, segments_with_rest

CONVOLUTION, RULE = "causal_conv1d_fn", "chunk_gated_delta_rule"
"""What a layer mixes tokens by."""
CHUNK = 64
"""Tokens that rules compute at once; transformers' fills up a row to a multiple."""
REPLACED_ARGUMENTS = ("initial_state", "output_final_state", "cu_seqlens", "cu_seqlens_cpu")
"""Arguments of a rule that a trie has other values for."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Pieces that are computed in one call, for all that they go on from is computed."""

    lengths: list[int]
    """Tokens of each piece."""
    parents: torch.Tensor
    """The piece, of the level before, that each goes on from; unread on the first, where they
    begin rows."""
    ends: torch.Tensor
    """int64 (pieces + 1,): where they begin and end."""
    ends_cpu: torch.Tensor
    """The same on the CPU, so that no layer waits for the device."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Where a recurrence begins and ends along the paths of a trie.

    The segments [5, 6, 7, 9, 9] and [7, 8] of the rows [5, 6, 7, 9, 9] and [5, 6, 7, 8] have the
    pieces [5, 6], which both of [7, 9, 9] and [7, 8] go on from.
    """

    levels: list[Level]
    places: torch.Tensor
    """Where the tokens of the pieces are computed, one level after the other."""
    inverse: torch.Tensor
    """Where, among those, each computed token is."""


def cut_pieces(trie: PrefixTrie, tokens: int, device: torch.device) -> Pieces:
    """The pieces of a micro-batch of so many tokens; those behind the trie fill up a bucket."""
    # Segments of 5 and 2 tokens begin at 0 and 5; the second goes on from place 1. Pieces end at 2,
    # after that place, and at 5 and 7: [0, 2) on level 0, and [2, 5) and [5, 7), which both go on
    # from it, on level 1.
    segments = segments_with_rest(trie, tokens)
    begins = accumulate((len(path) - start for path, start in segments), initial=0)
    # Where each segment begins -> where the piece that it goes on from ends, one behind the token
    # before its first one; 0 if there is none.
    parent_end_of = {
        begin: int(path[start - 1]) + 1 if start else 0
        for begin, (path, start) in zip(begins, segments, strict=False)
    }
    borders = sorted({*parent_end_of, *parent_end_of.values(), tokens})
    # Where a piece ends -> its level, and its number there; nothing ends at 0. A parent comes first
    # in the order of borders, as a token is computed after all that are before it on its path.
    level_of, index_of = {0: -1}, {0: -1}
    # Beginnings, ends and parents of the pieces of each level.
    pieces: list[list[tuple[int, int, int]]] = []
    for begin, end in pairwise(borders):
        # A piece that does not begin a segment goes on from the one right before it.
        parent_end = parent_end_of.get(begin, begin)
        level = level_of[parent_end] + 1
        if level == len(pieces):
            pieces.append([])
        level_of[end], index_of[end] = level, len(pieces[level])
        pieces[level].append((begin, end, index_of[parent_end]))
    places = torch.cat([torch.arange(begin, end) for begin, end, _ in chain(*pieces)])
    levels: list[Level] = []
    for of_level in pieces:
        lengths = [end - begin for begin, end, _ in of_level]
        ends = torch.tensor([*accumulate(lengths, initial=0)])
        parents = torch.tensor([parent for _, _, parent in of_level], device=device)
        on_device = ends.to(device)
        levels.append(Level(lengths=lengths, parents=parents, ends=on_device, ends_cpu=ends))
    return Pieces(levels=levels, places=places.to(device), inverse=places.argsort().to(device))


def convolved_places(
    trie: PrefixTrie, tokens: int, device: torch.device, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a convolution over ``width`` tokens reads: each segment behind the tokens before it.

    Returns: their places, ``tokens`` where a row has none; and which outputs are those of segments.
    """
    read: list[Int64s] = []
    kept: list[Int64s] = []
    at = 0
    for path, start in segments_with_rest(trie, tokens):
        missing = max(width - 1 - start, 0)
        read += [np.full(missing, tokens), path[start - (width - 1 - missing) :]]
        at += width - 1
        kept.append(np.arange(at, at + len(path) - start))
        at += len(path) - start
    places, outputs = (torch.from_numpy(np.concatenate(each)).to(device) for each in (read, kept))
    return places, outputs


def linear_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that mix tokens by a gated delta rule behind a convolution.

    A module that wraps such a layer, as FSDP's do, answers for its attributes, but has none.
    """
    return (module for module in model.modules() if {CONVOLUTION, RULE} <= vars(module).keys())


def patch_linear_attention(model: nn.Module) -> list[nn.Module]:
    """Has the linear attention of a model follow tries; returns its layers."""
    layers = list(linear_layers(model))
    for layer in layers:
        convolve = getattr(layer, CONVOLUTION) or causal_conv1d
        setattr(layer, CONVOLUTION, convolve_paths(layer, convolve))
        setattr(layer, RULE, carry_states(layer, getattr(layer, RULE)))
    return layers


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """causal_conv1d's function, by torch: x (rows, channels, tokens), weight (channels, width)."""
    assert activation in ("silu", "swish")
    padded = functional.pad(x, (weight.shape[-1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight[:, None], bias, groups=len(weight)))


def convolve_paths(layer: nn.Module, convolve: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's ``causal_conv1d_fn`` along the paths of its trie."""

    @functools.wraps(convolve)
    def convolve_with_trie(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        trie: PrefixTrie | None = getattr(layer, TRIE, None)
        if trie is None:
            return convolve(x=x, weight=weight, **kwargs)
        trie.attended.add((id(layer), CONVOLUTION))
        # Which row a token is of need not be known: what is kept reads tokens of its path alone.
        kwargs.pop("seq_idx", None)
        read, kept = trie.cached(convolved_places, x.shape[-1], x.device, weight.shape[-1])
        with_zeros = functional.pad(x.transpose(1, 2), (0, 0, 0, 1))
        segments = GatherTokens.apply(with_zeros, 1, read).transpose(1, 2)
        out = convolve(x=segments, weight=weight, **kwargs)
        return out.transpose(1, 2).index_select(1, kept).transpose(1, 2)

    return convolve_with_trie


def carry_states(layer: nn.Module, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's ``chunk_gated_delta_rule`` along the paths of its trie, level by level."""
    # transformers' rule takes any argument, and ignores those that it does not know.
    known = inspect.signature(rule).parameters

    @functools.wraps(rule)
    def carry_states_with_trie(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        trie: PrefixTrie | None = getattr(layer, TRIE, None)
        if trie is None:
            return rule(query, key, value, g=g, beta=beta, **kwargs)
        trie.attended.add((id(layer), RULE))
        kwargs = {name: each for name, each in kwargs.items() if name not in REPLACED_ARGUMENTS}
        pieces: Pieces = trie.cached(cut_pieces, query.shape[1], query.device)
        levels, parts = pieces.levels, (query, key, value, g, beta)
        if len(levels) > 1:
            parts = tuple(part.index_select(1, pieces.places) for part in parts)
        sizes = [sum(level.lengths) for level in levels]
        split = zip(*(part.split(sizes, 1) for part in parts), strict=True)
        outputs: list[torch.Tensor] = []
        states: Any = None
        for level, part in zip(levels, split, strict=True):
            states = None if level is levels[0] else states.index_select(0, level.parents)
            kwargs |= {"initial_state": states, "output_final_state": level is not levels[-1]}
            if "cu_seqlens" in known:  # fla's
                on_cpu = {"cu_seqlens_cpu": level.ends_cpu} if "cu_seqlens_cpu" in known else {}
                q, k, v, decay, strength = part
                out, states = rule(
                    q, k, v, g=decay, beta=strength, cu_seqlens=level.ends, **on_cpu, **kwargs
                )
            else:
                out, states = _side_by_side(rule, part, level.lengths, **kwargs)
            outputs.append(out)
        if len(levels) == 1:
            return outputs[0], None
        return torch.cat(outputs, 1).index_select(1, pieces.inverse), None

    return carry_states_with_trie


def _side_by_side(
    rule: Callable[..., Any],
    parts: Sequence[torch.Tensor],
    lengths: list[int],
    initial_state: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls of a rule that takes no pieces one behind the other: those of as many chunks at once.

    What fills them up changes no state, as its keys, decays and strengths are 0.
    """
    split = [part[0].split(lengths) for part in parts]
    outputs: list[Any] = [None] * len(lengths)
    ends: list[Any] = [None] * len(lengths)
    by_chunks: dict[int, list[int]] = {}
    for piece, length in enumerate(lengths):
        by_chunks.setdefault(-(-length // CHUNK), []).append(piece)
    for numbers in by_chunks.values():
        q, k, v, g, beta = (
            pad_sequence([part_pieces[piece] for piece in numbers], batch_first=True)
            for part_pieces in split
        )
        states = None if initial_state is None else initial_state[numbers]
        out, after = rule(q, k, v, g=g, beta=beta, initial_state=states, **kwargs)
        for place, piece in enumerate(numbers):
            outputs[piece] = out[place, : lengths[piece]]
            ends[piece] = None if after is None else after[place]
    return torch.cat(outputs)[None], None if ends[0] is None else torch.stack(ends)
