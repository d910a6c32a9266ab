"""What rows that begin alike share, beside the rows themselves."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_padding.plan.prefix_tries import PrefixTries, common_prefix_length

# 257 and 65536 have the bytes of others.
TOKENS = st.sampled_from([0, 1, 257, 65536])
TOKEN_ROWS = st.lists(st.lists(TOKENS, min_size=1, max_size=7), min_size=1, max_size=9)


def alike(one, other):
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def tries_of(rows):
    order = sorted(range(len(rows)), key=lambda row: rows[row], reverse=True)
    shared_I = [0, *[alike(rows[before], rows[row]) for before, row in pairwise(order)]]
    return PrefixTries.in_order(list(map(len, rows)), order, shared_I)


@given(TOKEN_ROWS, st.data())
def test_tries_of_tokens_are_found_by_comparing_each_pair(rows, data):
    group_R = data.draw(st.lists(st.sampled_from("ab"), min_size=len(rows), max_size=len(rows)))
    tries = PrefixTries.from_tokens([np.array(row) for row in rows], group_R)
    for one in range(len(rows)):
        for other in range(one):
            _, (_, shared) = tries.shared_among(np.array([one, other]))
            assert shared == (
                alike(rows[one], rows[other]) if group_R[one] == group_R[other] else 0
            )


@given(TOKEN_ROWS)
def test_arrays_are_alike_up_to_the_first_entry_that_differs(rows):
    for one, other in pairwise(rows):
        as_lines = [np.array(row)[:, None, None].repeat(2, axis=2) for row in (one, other)]
        assert common_prefix_length(*as_lines) == common_prefix_length(
            np.array(one), np.array(other)
        )
        assert common_prefix_length(*as_lines) == alike(one, other)


def tokens_computed(rows):
    """Each beginning of a row once, and once more the last token before each further branch: tokens
    of a trie."""
    beginnings = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    further = {}
    for each in beginnings:
        further.setdefault(each[:-1], set()).add(each)
    return len(beginnings) + sum(
        len(after) - 1 for before, after in further.items() if len(before) >= 2
    )


@given(TOKEN_ROWS, st.data())
def test_any_rows_of_a_micro_batch_compute_each_beginning_once(rows, data):
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1))
    numbers = np.array(some)
    at, start_I = tries_of(rows).segments(numbers)
    numbers = numbers[at]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(some)
    computed = sum(len(rows[row]) - start for row, start in zip(numbers, start_I, strict=True))
    # A beginning of one token is not worth sharing: each row that parts there computes it by
    # itself.
    one_token = {}
    for row in {tuple(rows[row]) for row in some}:
        one_token.setdefault(row[0], set()).add(row[1:2])
    alone = sum(len(after - {()}) - 1 for after in one_token.values() if after - {()})
    assert computed == tokens_computed([rows[row] for row in some]) + alone


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=9, min_size=1), st.data())
def test_where_whole_rows_are_shared_those_that_none_goes_on_from_are_computed(rows, data):
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True, min_size=1))
    at, start_I = replace(tries_of(rows), whole_rows_only=True).segments(np.array(some))
    assert not start_I.any()
    texts = {tuple(rows[row]) for row in some}
    longer = {one[:n] for one in texts for n in range(len(one))}
    assert sorted(tuple(rows[some[place]]) for place in at) == sorted(texts - longer)


@given(TOKEN_ROWS, st.data())
def test_rows_of_several_micro_batches_compute_what_each_of_them_does(rows, data):
    batch_R = np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    )
    tries, numbers = tries_of(rows), np.arange(len(rows))
    at, start_I = tries.segments(numbers, batch_R)
    together = {(int(row), int(start)) for row, start in zip(at, start_I, strict=True)}
    apart = set()
    for batch in range(3):
        own = numbers[batch_R == batch]
        places, starts = tries.segments(own)
        apart |= {
            (int(own[place]), int(start)) for place, start in zip(places, starts, strict=True)
        }
    assert together == apart
