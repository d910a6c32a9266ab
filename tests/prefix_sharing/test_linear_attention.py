"""Pieces of a tree's segments, and what a convolution reads of its paths."""

import torch

from verl_padding.prefix_sharing.linear_attention import convolved_places, cut_pieces
from verl_padding.prefix_sharing.tree import build_tree, tree_of_rows

CPU = torch.device("cpu")


def test_pieces_end_where_others_branch_off_before_the_token_that_they_copy():
    # [5, 6, 7, 9, 9] and, after a copy of the third token, [7, 8].
    tree = build_tree([5, 4], [0, 1], [0, 3])
    first, second = cut_pieces(tree, 7, CPU).levels
    assert (first.lengths, first.parents) == ([2], None)
    assert second.lengths == [3, 2]
    assert second.parents.tolist() == [0, 0]
    assert second.ends.tolist() == [0, 3, 5]


def test_rows_that_share_nothing_and_what_fills_a_bucket_begin_in_no_state():
    (level,) = cut_pieces(tree_of_rows([3, 1, 4]), 10, CPU).levels
    assert (level.lengths, level.parents) == ([3, 1, 4, 2], None)


def test_a_convolution_reads_the_tokens_before_on_the_path_or_zeros():
    tree = build_tree([5, 4], [0, 1], [0, 3])
    read, kept = convolved_places(tree, 7, CPU, 4)
    assert read.tolist() == [7, 7, 7, 0, 1, 2, 3, 4, 7, 0, 1, 5, 6]
    assert kept.tolist() == [3, 4, 5, 6, 7, 11, 12]
