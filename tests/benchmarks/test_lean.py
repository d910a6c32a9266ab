"""Which rows of the benchmark of what is not computed are idle."""

from benchmarks.lean import idle_rows


def test_idle_rows_are_of_whole_prompts_whose_tokens_are_closest_to_the_share():
    # Of prompts with 10, 20, 30 and 40 tokens, the second and the last.
    rows = [(f"p{n}_{session}_0", [5] * 3, [5] * (5 * n - 3)) for n in (1, 2, 3, 4) for session in (0, 1)]
    assert idle_rows(rows, 0.6) == [2, 3, 6, 7]
    assert idle_rows(rows, 0.0) == []
