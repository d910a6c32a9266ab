"""What rows that begin alike share, beside the rows themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_padding.plan.prefix_tries import PrefixTries

# 257 and 65536 have the bytes of others.
TOKENS = st.sampled_from([0, 1, 257, 65536])
TOKEN_ROWS = st.lists(st.lists(TOKENS, min_size=1, max_size=7), min_size=1, max_size=9)


def alike(one, other):
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


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
