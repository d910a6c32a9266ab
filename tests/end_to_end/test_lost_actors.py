"""An actor of a real job is killed where verl and TransferQueue would wait for it: the job ends, and says why."""

import time

import pytest

from tests.end_to_end.jobs import run_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 60
"""Seconds that a job may take to end, with all its processes; without the watch, 150 at the least."""
STEPS = 85
"""All that one epoch of the data has: no machine is through them before the watch has looked twice."""


# The watch is the same in all modes, and for all kinds of actors (tests/driver/test_actor_watch.py).
def test_a_job_whose_storage_is_killed_ends_soon_and_names_it(tmp_path):
    facts = run_job(tmp_path, "+padding=prompt", steps=STEPS, kill_actor="SimpleStorageUnit:2")
    ended = time.time()
    assert 1 <= max(facts.metrics) < STEPS
    assert "LostActorError: TransferQueue's storage: " in facts.log
    assert ended - facts.killed_at < LIMIT_S
