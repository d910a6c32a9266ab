"""What the benchmark of updates measures, and on which rows."""

import pytest

from benchmarks.update_sides import Case, tokens_of
from benchmarks.updates import (
    BUDGET,
    HYBRID_SCALE,
    STOCK,
    fast_cases,
    hybrid_cases,
    idle_cases,
    sharing_cases,
)


@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_an_update_with_a_step_that_learns_nothing_ends_the_benchmark(norm):
    case = Case(
        rows=[("p_0_0", [5], [6, 7])], prompts=1, sessions=1, mini_prompts=1, sides=(STOCK,)
    )
    found = case._figures({"metrics": {"grad_norm": [0.5, 0.25]}}, 1.0, 2, 3)
    assert found == {
        "update": 1.0,
        "pads": 2,
        "wasted_tokens": 0.5,
        "steps": 2,
        "grad_norm": [0.5, 0.25],
    }
    with pytest.raises(AssertionError, match="learns nothing"):
        case._figures({"metrics": {"grad_norm": [0.5, norm]}}, 1.0, 0, 0)


def test_rows_are_those_that_the_page_says():
    idle = idle_cases()
    assert [round(case.idle_share, 1) for case in idle.values()] == [0.0, 0.3, 0.6, 0.6]
    assert len(idle["60% idle"].rows) == 128 * 8
    for name, case in (fast_cases() | sharing_cases()).items():
        assert len({key for key, _, _ in case.rows}) == len(case.rows), name
        assert max(map(tokens_of, case.rows)) <= 1024
    for name, case in hybrid_cases().items():
        assert len({key for key, _, _ in case.rows}) == len(case.rows), name
        assert max(map(tokens_of, case.rows)) <= BUDGET * HYBRID_SCALE
