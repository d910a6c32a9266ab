"""Which rows of the benchmark of what is not computed are idle, and that its sides learn the same."""

import numpy as np

from benchmarks.lean import idle_rows
from benchmarks.results import kept


def test_idle_rows_are_of_whole_prompts_whose_tokens_are_closest_to_the_share():
    # Of prompts with 10, 20, 30 and 40 tokens, the second and the last.
    rows = [(f"p{n}_{session}_0", [5] * 3, [5] * (5 * n - 3)) for n in (1, 2, 3, 4) for session in (0, 1)]
    assert idle_rows(rows, 0.6) == [2, 3, 6, 7]
    assert idle_rows(rows, 0.0) == []


def test_the_sides_of_each_case_that_are_kept_have_the_same_gradients():
    for case in kept("lean")["cases"].values():
        norms = [took["grad_norm"] for rounds in case["sides"].values() for took in rounds]
        assert np.min(norms) > 0
        np.testing.assert_allclose(norms, [norms[0]] * len(norms), rtol=1e-3)
