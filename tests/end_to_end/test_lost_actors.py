"""An actor of a real job is killed where verl and TransferQueue would wait for it: the job ends, and says why."""

import time

import pytest

from tests.end_to_end.jobs import run_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 60
"""Seconds that a job may take to end, with all its processes; without the watch, 150 at the least."""
STEPS = 85
"""All that one epoch of the data has: no machine is through them before the watch has looked twice."""


# The watch is the same in all modes, and for all kinds of actors (tests/driver/test_actor_watch.py); only with
# colocate_async are agent loop workers busy while the step trains.
@pytest.mark.parametrize(
    ("actor", "name", "mode"),
    [
        ("SimpleStorageUnit", "TransferQueue's storage", "sync"),
        ("PaddedAgentLoopWorker", "agent loop worker", "colocate_async"),
    ],
)
def test_a_job_whose_actor_is_killed_ends_soon_and_names_it(actor, name, mode, tmp_path):
    settings = ("+padding=prompt", f"trainer.v1.trainer_mode={mode}")
    facts = run_job(tmp_path, *settings, steps=STEPS, kill_actor=f"{actor}:2")
    ended = time.time()
    assert 1 <= max(facts.metrics) < STEPS
    assert f"LostActorError: {name}: " in facts.log
    assert ended - facts.killed_at < LIMIT_S
