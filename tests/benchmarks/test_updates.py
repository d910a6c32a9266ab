"""What the benchmark of updates measures, and on which rows."""

from benchmarks.update_sides import RANKS, tokens_of
from benchmarks.updates import (
    BUDGET,
    HYBRID_SCALE,
    fast_cases,
    hybrid_cases,
    idle_cases,
    sharing_cases,
)


def test_rows_are_those_that_the_page_says():
    idle = idle_cases()
    assert [round(case.idle_share, 1) for case in idle.values()] == [0.0, 0.3, 0.6, 0.6]
    assert len(idle["60% idle"].rows) == 128 * 8
    assert all(len(case.rows) % RANKS == 0 for case in fast_cases().values())
    for name, case in (fast_cases() | sharing_cases()).items():
        assert len({key for key, _, _ in case.rows}) == len(case.rows), name
        assert max(map(tokens_of, case.rows)) <= 1024
    for name, case in hybrid_cases().items():
        assert len({key for key, _, _ in case.rows}) == len(case.rows), name
        assert max(map(tokens_of, case.rows)) <= BUDGET * HYBRID_SCALE
