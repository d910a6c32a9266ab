"""A whole job on eight FSDP2 ranks: some get pads alone in most mini-batches."""

import pytest

from tests.end_to_end.jobs import ACTOR, run_job
from tests.end_to_end.test_padded_jobs import assert_finite_and_agreeing

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 2


def test_eight_ranks_train_on_batches_that_eight_does_not_divide(tmp_path):
    facts = run_job(
        tmp_path,
        "+padding=prompt",
        "padding.packer=plan",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        steps=STEPS,
    )
    assert_finite_and_agreeing(facts)
    assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
    steps = facts.optimizer_steps[ACTOR]
    taken = [int(metrics["padding/actor/optimizer_steps/total"]) for metrics in facts.metrics.values()]
    assert len(steps) == sum(taken)
    assert all(step.moved and len(step.nodes) == 8 for step in steps)
    assert all(step.rows % 8 == 0 for step in steps)
    assert sum(step.real_rows for step in steps) == sum(rows.real for rows in facts.rows.values())
    assert any(step.real_rows % 8 for step in steps), "no mini-batch was awkward"
