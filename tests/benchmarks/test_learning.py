"""The study of learning: its runs are whole jobs, and its figures what they are called."""

import pytest

from benchmarks.learning import Kind, p_value, run
from benchmarks.results import kept


def test_a_run_begins_as_a_whole_job_of_its_seed(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.learning.BATCHES", 2)
    (reward, rows, steps) = (
        run(Kind("two symbols", "grpo", 1.0, "prompt"), 1, tmp_path)[name]
        for name in ("reward", "rows", "steps")
    )
    job = kept("runs source_job")["runs"]["prompt_seed1"]
    assert reward == [round(1000 * each) for each in job["reward"][:2]]
    assert (rows, steps) == (job["rows"][:2], job["optimizer_steps"][:2])


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [([1, 2, 3], [0, 1, 2], 2 / 8), ([1, 0], [0, 1], 1), ([4, 2], [1, 1], 2 / 4)],
)
def test_a_permutation_test_counts_the_ways_to_exchange_pairs(one, other, p):
    # Differences of 3 and 1: of 3 + 1, 3 - 1, -3 + 1 and -3 - 1, two are as far from 0 as 3 + 1.
    assert p_value(one, other) == p
