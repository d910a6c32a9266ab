"""The rows of a micro-batch as a trie, in which each token that rows share is computed once, also
where rows branch.

A row that is not the beginning of another one has a *segment*: the whole row, or what follows the
shared tokens and a copy of the last one of them, because a token's output is compared with the
token after it, which is another one on each branch. All tokens of a row, shared or not, are its
*path*: queries of a segment attend to keys and values of the path, by :class:`Paths`, or by
:class:`PackedPaths` in Megatron's buffer.

How rows of a whole batch begin alike, for the plan, is in ``plan/prefix_tries.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_padding.plan.cost import Int64s
from verl_padding.plan.prefix_tries import cached_tokens

TRIE = "prefix_trie"
"""Key of the trie in a micro-batch, and of its place on attention modules, in their calls and on
Megatron's ``packed_seq_params``."""


@dataclass(frozen=True, kw_only=True)
class Paths:
    """The segments and paths of a trie, as attention on a device takes them."""

    places: torch.Tensor
    """Where the tokens of the paths are computed, one path after the other."""
    lengths_L: list[int]
    """Tokens of each segment."""
    path_lengths_L: list[int]
    """Tokens of each path."""

    @cached_property
    def ends_L(self) -> torch.Tensor:
        """int32 (L + 1,): where the segments begin and end."""
        return self._ends(self.lengths_L)

    @cached_property
    def path_ends_L(self) -> torch.Tensor:
        """int32 (L + 1,): where the paths begin and end."""
        return self._ends(self.path_lengths_L)

    def _ends(self, lengths: list[int]) -> torch.Tensor:
        ends = [*accumulate(lengths, initial=0)]
        return torch.tensor(ends, dtype=torch.int32, device=self.places.device)


@dataclass(frozen=True, kw_only=True)
class PrefixTrie:
    """Where each token of each row of a micro-batch is computed.

    Rows [5, 6, 7, 8], [5, 6, 7, 9, 9] and [5, 6], of which the second comes first, have the
    segments [5, 6, 7, 9, 9] and [7, 8]: ``leaf_L`` is [1, 0], ``start_L`` [0, 2], and the first
    row's tokens are computed at [0, 1, 5, 6].
    """

    leaf_L: list[int]
    """The row of each segment."""

    start_L: list[int]
    """The first token, in its row, of each segment."""

    place_RT: list[Int64s]
    """Where, among the tokens of all segments, each token of each row is computed."""

    attended: set[Any] = field(default_factory=set)
    """Layers whose attention has followed the trie; of linear attention, each of its callables."""

    cache: dict[Any, Any] = field(default_factory=dict)
    """What :meth:`cached` has made, such as places on a device."""

    @cached_property
    def path_lengths_L(self) -> list[int]:
        """Keys that the last query of each segment attends to: the tokens of its row."""
        return [len(self.place_RT[leaf]) for leaf in self.leaf_L]

    @cached_property
    def lengths_L(self) -> list[int]:
        """Tokens of each segment."""
        return [path - start for path, start in zip(self.path_lengths_L, self.start_L, strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths_L)

    def cached(self, make: Callable[..., Any], *of: Any) -> Any:
        """``make(self, *of)``, made once for all layers."""
        if (make, *of) not in self.cache:
            self.cache[make, *of] = make(self, *of)
        return self.cache[make, *of]

    @cached_property
    def row_places(self) -> torch.Tensor:
        """Where the tokens of the rows are computed, one row after the other."""
        return torch.from_numpy(np.concatenate(self.place_RT))

    @property
    def has_branches(self) -> bool:
        """Whether a segment continues the beginning of another one; if not, segments are whole
        rows."""
        return any(self.start_L)


def make_paths(trie: PrefixTrie, tokens: int, device: torch.device) -> Paths:
    """What attention to the paths needs, of a micro-batch of ``tokens``: those behind the trie fill
    up Ulysses ranks."""
    segments = segments_with_rest(trie, tokens)
    return Paths(
        places=torch.from_numpy(np.concatenate([path for path, _ in segments])).to(device),
        lengths_L=[len(path) - start for path, start in segments],
        path_lengths_L=[len(path) for path, _ in segments],
    )


def segments_with_rest(trie: PrefixTrie, tokens: int) -> list[tuple[Int64s, int]]:
    """The path of each segment, and where on it the segment begins; the tokens behind the trie, up
    to ``tokens``, are one more."""
    paths = [trie.place_RT[leaf] for leaf in trie.leaf_L]
    segments = list(zip(paths, trie.start_L, strict=True))
    return segments + ([(np.arange(trie.tokens, tokens), 0)] if tokens > trie.tokens else [])


def trie_of_rows(lengths_R: Sequence[int]) -> PrefixTrie:
    """Rows one behind the other, which share nothing."""
    return build_trie(lengths_R, range(len(lengths_R)), [0] * len(lengths_R))


def build_trie(
    lengths_R: Sequence[int],
    order: Sequence[int],
    shared_I: Sequence[int],
) -> PrefixTrie:
    """
    Args:
        lengths_R: tokens of each row.
        order: the rows' numbers, so that a row shares most with the row before it, and a longer row
            comes before its own beginnings.
        shared_I: how many of its first tokens each row, in that order, shares with the row before
            it.
    """
    # Rows 0 [5, 6, 7, 8], 1 [5, 6, 7, 9, 9] and 2 [5, 6], in the order 1, 0, 2, share 0, 3 and 2
    # tokens: row 1 is computed at 0 to 4; of row 0, two tokens are at 0 and 1, and its [7, 8] at 5
    # and 6; row 2 has nothing of its own, and is at 0 and 1.
    leaf_L: list[int] = []
    start_L: list[int] = []
    place_RT: list[Int64s] = [np.empty(0, dtype=np.int64)] * len(lengths_R)
    tokens = 0
    before = np.empty(0, dtype=np.int64)
    lengths_I = np.array([lengths_R[row] for row in order])
    starts_I = cached_tokens(np.asarray(shared_I), lengths_I).tolist()
    for row, start in zip(order, starts_I, strict=True):
        own = np.arange(tokens, tokens + lengths_R[row] - start)
        place_RT[row] = before = np.concatenate([before[:start], own])
        if len(own):
            leaf_L.append(row)
            start_L.append(start)
            tokens += len(own)
    return PrefixTrie(leaf_L=leaf_L, start_L=start_L, place_RT=place_RT)


def trie_of(data: TensorDict) -> PrefixTrie | None:
    """The trie of a micro-batch that shares some of its tokens; None for any other."""
    return data[TRIE] if TRIE in data else None  # noqa: SIM401  (get wraps what is no tensor)


@dataclass(frozen=True, kw_only=True)
class PackedPaths(Paths):
    """Paths in Megatron's packed buffer, in which each segment is filled up to a multiple of
    tokens, and whose context parallel ranks have two chunks of each.

    It is what a rank's attention takes, of each segment or, with context parallelism, of each of
    its two chunks; ``places`` are in what the ranks of a row gather.

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
