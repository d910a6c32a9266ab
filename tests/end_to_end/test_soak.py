"""Forty steps with anything from 50 to 500 rows: what a step took, it gives back."""

from pathlib import Path
from statistics import median

import pytest

from tests.end_to_end.jobs import ACTOR, run_job

STEPS, WARM, LOOK = 40, 15, 10
MEMORY_GROWTH = 1.05
"""Most that a process may hold in the last steps over the most that it held until it was warm. The job's allocator
gives back what is free (:data:`tests.end_to_end.jobs.FREE_IS_GIVEN_BACK`), so that what stays is in use."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_queue_objects_and_memory_come_back_to_their_level_though_the_queue_is_saved_at_every_step(tmp_path: Path):
    facts = run_job(
        tmp_path,
        "+padding=rows",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=many_rows_and_no_empty_session",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "actor_rollout_ref.rollout.n=5",
        steps=STEPS,
        levels=True,
    )
    levels = {level["step"]: level for level in facts.levels}
    assert sorted(levels) == list(range(1, STEPS + 1))
    real = [metrics["padding/real_rows/total"] for metrics in facts.metrics.values()]
    assert (min(real) < 100, max(real) > 400) == (True, True), "the numbers of rows were meant to vary"
    assert sum(metrics["padding/pad_rows/total"] for metrics in facts.metrics.values()) > STEPS
    assert sum(step.real_rows for step in facts.optimizer_steps[ACTOR]) == sum(real)
    assert min(step.real_rows for step in facts.optimizer_steps[ACTOR]) >= 1
    trained = {key for note in facts.batches for key in note["keys"]}
    assert len(trained) > 1000
    left = {key for level in levels.values() for key in level["rows"] if key in trained or key.startswith("pad")}
    for step, level in levels.items():
        gone = {key for note in facts.batches if note["step"] <= step for key in note["keys"]}
        assert not gone & set(level["rows"])
        assert not [key for key in level["rows"] if key.startswith("pad")]
    assert left, "no row was ever in flight"
    assert_level(levels)


def assert_level(levels: dict[int, dict]) -> None:
    """Ray's objects and the memory of each process are once warm what they are at the end."""
    objects = [levels[step]["objects"] for step in sorted(levels)]
    # Some are on their way out when the step ends, now and then; what stays would be there at each step.
    assert min(objects[-LOOK:]) <= min(objects[:WARM]), objects
    lasting = set(levels[WARM]["memory"]) & set(levels[STEPS]["memory"])
    assert len(lasting) >= 5, levels[STEPS]["memory"]
    for name in lasting:
        once_warm = max(levels[step]["memory"].get(name, 0) for step in range(1, WARM + LOOK + 1))
        at_the_end = median(levels[step]["memory"][name] for step in range(STEPS - LOOK + 1, STEPS + 1))
        assert at_the_end <= MEMORY_GROWTH * once_warm, (name, once_warm, at_the_end)
