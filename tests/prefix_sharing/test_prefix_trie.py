"""A trie of three rows, whose places are found by hand."""

import torch

from verl_padding.prefix_sharing.prefix_trie import build_trie, make_paths


def test_paths_are_those_of_the_leaves_and_of_what_fills_a_micro_batch_up():
    # [5, 6, 7, 8], [5, 6, 7, 9, 9] and [5, 6]; the second comes first, and the third is in it.
    trie = build_trie([4, 5, 2], [1, 0, 2], [0, 3, 2])
    assert (trie.leaf_L, trie.start_L, trie.tokens, trie.has_branches) == ([1, 0], [0, 2], 7, True)
    assert [places.tolist() for places in trie.place_RT] == [[0, 1, 5, 6], [*range(5)], [0, 1]]
    assert trie.row_places.tolist() == [0, 1, 5, 6, *range(5), 0, 1]
    paths = make_paths(trie, 9, torch.device("cpu"))
    assert paths.places.tolist() == [*range(5), 0, 1, 5, 6, 7, 8]
    assert (paths.lengths_L, paths.ends_L.tolist()) == ([5, 2, 2], [0, 5, 7, 9])
    assert (paths.path_lengths_L, paths.path_ends_L.tolist()) == ([5, 4, 2], [0, 5, 9, 11])
