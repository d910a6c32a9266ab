"""The paths of a trie in Megatron's packed buffer, in which each segment is filled up to a multiple
of tokens, and whose context parallel ranks have two chunks of each segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from verl_padding.plan.cost import Int64s
from verl_padding.prefix_sharing.prefix_trie import Paths, PrefixTrie


@dataclass(frozen=True, kw_only=True)
class PackedPaths(Paths):
    """What a rank's attention takes, of each segment or, with context parallelism, of each of its
    two chunks; ``places`` are in what the ranks of a row gather.

    Rows [5, 6, 7, 9, 9] and [5, 6, 7, 8], of which the second has the segment [7, 8], fill
    multiples of 4 in a buffer that ends at 8 and 12: their paths are [0 .. 7] and [0, 1, 8 .. 11],
    and their positions 0 .. 7 and 2 .. 5.
    """

    positions: torch.Tensor
    """int64 (T,): the place of each of this rank's tokens in its row."""


def pack_paths(
    trie: PrefixTrie, ends: Sequence[int], ranks: int, rank: int, device: torch.device
) -> PackedPaths:
    """
    Args:
        ends: where the filled segments begin and end in the buffer of all context parallel ranks.
        ranks, rank: of context parallelism. Of 2 x ranks chunks of a segment, a rank has the one of
            its number from the front, and that from the back.
    """
    before_I = np.array([*accumulate(trie.lengths_L, initial=0)])
    # How far the filled segments before it move each token.
    moved_T = np.repeat(np.array(ends[:-1]) - before_I[:-1], trie.lengths_L)
    numbers = (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,)
    places, positions = [], []
    for leaf, start, (begin, end) in zip(trie.leaf_L, trie.start_L, pairwise(ends), strict=True):
        shared = trie.place_RT[leaf][:start]
        path = np.concatenate([shared + moved_T[shared], np.arange(begin, end)])
        chunk = (end - begin) // (len(numbers) * ranks)
        for number in numbers:
            first = start + number * chunk
            positions.append(np.arange(first, first + chunk))
            places.append(path[: first + chunk])
    return PackedPaths(
        places=torch.from_numpy(_gathered_places(ends, ranks)[np.concatenate(places)]).to(device),
        lengths_L=list(map(len, positions)),
        path_lengths_L=list(map(len, places)),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
    )


def _gathered_places(ends: Sequence[int], ranks: int) -> Int64s:
    """Where each token of the buffer is in what context parallel ranks gather: all tokens of one
    rank before those of the next."""
    if ranks == 1:
        return np.arange(ends[-1])
    # Of two ranks, the first has the chunks a and d of each segment, and the second b and c.
    segments = [np.arange(begin, end).reshape(2 * ranks, -1) for begin, end in pairwise(ends)]
    gathered = [
        chunks[[rank, 2 * ranks - 1 - rank]].ravel() for rank in range(ranks) for chunks in segments
    ]
    return np.argsort(np.concatenate(gathered))
