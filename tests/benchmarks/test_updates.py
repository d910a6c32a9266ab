"""What the benchmark of updates measures, and on which rows."""

from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta

from benchmarks.update_sides import RANKS, Case, tokens_of
from benchmarks.updates import (
    BUDGET,
    HYBRID_SCALE,
    OFF,
    fast_cases,
    hybrid_cases,
    idle_cases,
    sharing_cases,
)


@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_an_update_that_learns_nothing_ends_the_benchmark(norm):
    def group_with(norm):
        return SimpleNamespace(update_actor=lambda batch: {"metrics": {"grad_norm": [norm]}})

    case = Case(rows=[("p_0_0", [5], [6, 7])], sides=(OFF,))
    batch = KVBatchMeta(keys=["p_0_0"], tags=[{}], partition_id="train", extra_info={})
    assert case._run(group_with(0.5), batch, OFF) == {"grad_norm": 0.5}
    with pytest.raises(AssertionError, match="learns nothing"):
        case._run(group_with(norm), batch, OFF)


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
