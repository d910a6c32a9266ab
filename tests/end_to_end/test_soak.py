"""Forty steps with anything from 50 to 500 rows: what a step took, it gives back."""

import pytest

from tests.support.jobs import ACTOR, run_job
from tests.support.probe import LEVELS

STEPS, WARM, LOOK = 40, 15, 10


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_queue_and_objects_come_back_to_their_level(tmp_path):
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
        probed={LEVELS: "1"},
    )
    levels = {level["step"]: level for level in facts.levels}
    assert sorted(levels) == list(range(1, STEPS + 1))
    real = [metrics["padding/real_rows/total"] for metrics in facts.metrics.values()]
    assert (min(real) < 100, max(real) > 400) == (True, True), (
        "the numbers of rows were meant to vary"
    )
    assert sum(metrics["padding/pad_rows/total"] for metrics in facts.metrics.values()) > STEPS
    assert sum(step.real_rows for step in facts.optimizer_steps[ACTOR]) == sum(real)
    assert min(step.real_rows for step in facts.optimizer_steps[ACTOR]) >= 1
    trained: set[str] = set()
    for step, level in levels.items():
        trained |= {key for note in facts.batches if note["step"] == step for key in note["keys"]}
        assert not [key for key in level["rows"] if key in trained or key.startswith("pad")]
    assert any(level["rows"] for level in levels.values()), "no row was ever in flight"
    # Some of Ray's objects are on their way out when the step ends, now and then; what stays would
    # be there at each.
    objects = [levels[step]["objects"] for step in sorted(levels)]
    assert min(objects[-LOOK:]) <= min(objects[:WARM]), objects
