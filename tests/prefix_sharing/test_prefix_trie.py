"""A trie of three rows, whose places are found by hand; and paths in Megatron's packed buffer, of
filled segments and of the chunks of ranks that share a row."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.token_tries import random_tries
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.prefix_sharing.prefix_trie import build_trie, make_paths, pack_paths

CPU = torch.device("cpu")


def test_paths_are_those_of_the_leaves_and_of_what_fills_a_micro_batch_up():
    # [5, 6, 7, 8], [5, 6, 7, 9, 9] and [5, 6]; the second comes first, and the third is in it.
    trie = build_trie([4, 5, 2], [1, 0, 2], [0, 3, 2])
    assert (trie.leaf_L, trie.start_L, trie.tokens, trie.has_branches) == ([1, 0], [0, 2], 7, True)
    assert [places.tolist() for places in trie.place_RT] == [[0, 1, 5, 6], [*range(5)], [0, 1]]
    assert trie.row_places.tolist() == [0, 1, 5, 6, *range(5), 0, 1]
    paths = make_paths(trie, 9, CPU)
    assert paths.places.tolist() == [*range(5), 0, 1, 5, 6, 7, 8]
    assert (paths.lengths_L, paths.ends_L.tolist()) == ([5, 2, 2], [0, 5, 7, 9])
    assert (paths.path_lengths_L, paths.path_ends_L.tolist()) == ([5, 4, 2], [0, 5, 9, 11])


def trie_of(rows):
    tries = PrefixTries.from_tokens(list(map(np.array, rows)))
    order = np.argsort(tries.dfs_position_R)
    return build_trie(list(map(len, rows)), order.tolist(), tries.shared_R[order].tolist())


@given(seed=st.integers(0, 200), ranks=st.sampled_from([1, 2, 3]), filled=st.sampled_from([1, 4]))
def test_each_token_sees_its_own_row_up_to_itself_on_whichever_rank(seed, ranks, filled):
    rows = random_tries(seed)
    trie = trie_of(rows)
    multiple = filled * (2 * ranks if ranks > 1 else 1)
    lengths = [-(-length // multiple) * multiple for length in trie.lengths_L]
    ends = [0, *np.cumsum(lengths).tolist()]
    # The buffer has token ids, and -1 where a segment is filled up.
    buffer = np.full(ends[-1], -1)
    for leaf, start, begin in zip(trie.leaf_L, trie.start_L, ends, strict=False):
        own = rows[leaf][start:]
        buffer[begin : begin + len(own)] = own
    n_chunks = 2 * ranks if ranks > 1 else 1
    of_ranks = [
        [
            buffer[begin:end].reshape(n_chunks, -1)[number]
            for begin, end in pairwise(ends)
            for number in ((rank, n_chunks - 1 - rank) if ranks > 1 else (0,))
        ]
        for rank in range(ranks)
    ]
    gathered = np.concatenate([chunk for of_rank in of_ranks for chunk in of_rank])
    seen = set()
    for rank, of_rank in enumerate(of_ranks):
        paths = pack_paths(trie, ends, ranks, rank, CPU)
        keys = np.split(gathered[paths.places], paths.path_ends_L[1:-1])
        positions = np.split(paths.positions.numpy(), paths.ends_L[1:-1])
        leaves = [leaf for leaf in trie.leaf_L for _ in range(2 if ranks > 1 else 1)]
        for leaf, chunk, path, at in zip(leaves, of_rank, keys, positions, strict=True):
            for token, place in zip(chunk.tolist(), at.tolist(), strict=True):
                if token < 0:
                    continue
                # The last query is at the last key, as causal attention has it.
                upto = path[: len(path) - len(chunk) + place - at[0] + 1].tolist()
                assert upto == rows[leaf][: place + 1]
                seen.add((leaf, place))
    assert seen == {
        (leaf, place)
        for leaf, start in zip(trie.leaf_L, trie.start_L, strict=True)
        for place in range(start, len(rows[leaf]))
    }
