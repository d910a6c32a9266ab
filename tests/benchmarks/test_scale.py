"""Steps without a model: both sides run verl's own methods on the same rows, and each second is told once."""

from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import scale
from benchmarks.scale import (
    MOST_ROWS_OF_SESSION,
    OURS,
    SESSIONS,
    SIDES,
    Clock,
    drawn_rows,
    group_of_one,
    make_trainer,
    n_prompts,
    step,
)
from tests.support.rows_in_queue import queue_content
from verl_padding.plan.row_keys import session_of_key, uid_of_key


@pytest.mark.parametrize("n_rows", [100, 1_000, 10_000])
def test_drawn_rows_are_as_many_as_asked_for_in_sessions_of_several_lengths(n_rows):
    keys, lengths = drawn_rows(n_rows)
    assert len(set(keys)) == len(keys) == len(lengths) == n_rows
    sessions = Counter(map(session_of_key, keys))
    assert len(sessions) == SESSIONS * n_prompts(n_rows)
    assert len({uid_of_key(key) for key in keys}) == n_prompts(n_rows)
    assert 1 < max(sessions.values()) <= MOST_ROWS_OF_SESSION
    assert min(min(length) for length in lengths) >= 1
    assert drawn_rows(n_rows)[1] == lengths


def test_a_part_is_timed_without_the_parts_inside_it(monkeypatch):
    now = SimpleNamespace(wall=0.0, cpu=0.0)
    monkeypatch.setattr(scale, "time", SimpleNamespace(perf_counter=lambda: now.wall, process_time=lambda: now.cpu))

    def work(seconds):
        now.wall += seconds
        now.cpu += seconds / 2

    clock = Clock()
    work(100)  # before any part
    with clock.over("outer"):
        work(1)
        with clock.over("inner"), clock.in_queue():
            work(2)
        work(4)
        clock.timed("inner", work)(8)
        with clock.over(scale.OTHER_RANKS):
            work(16)
    work(100)
    assert clock.told() == {
        "seconds": {"outer": 5.0, "inner": 10.0},
        "cpu_seconds": {"outer": 2.5, "inner": 5.0},
        "queue_seconds": {"inner": 2.0},
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("transfer_queue")
def test_a_step_of_each_side_runs_all_its_parts_and_leaves_nothing_in_the_queue():
    keys, lengths = drawn_rows(100)
    told = {}
    with group_of_one():
        for side in SIDES:
            clock, pads = step(make_trainer(side, len(keys)), keys, lengths)
            told[side] = clock.told()["seconds"]
            assert all(seconds > 0 for seconds in told[side].values())
            assert pads == 12 or (side != "stock verl" and pads > 0)
            assert not queue_content()
    verls = {"rest", "log-probs", "dispatch", "a rank", "advantages", "update", "metrics", "rows out", "pads"}
    assert told["stock verl"].keys() == verls | {"balance"}
    assert told["verl_padding"].keys() == verls | set(OURS)
