"""Whole jobs on other engines: four ranks, two to a row or to a model; trained, saved, resumed."""

from pathlib import Path

import pytest

from tests.end_to_end.jobs import ACTOR, CRITIC, JobFacts, run_job
from tests.support.tolerance import LOG_PROB_AGREEMENT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

SAVED, LAST = 2, 3
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
ENGINES = {
    "FSDP2, two ranks to a row": (
        (),
        "cpu",
        [
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
            "critic.fsdp.ulysses_sequence_parallel_size=2",
        ],
    ),
    "Megatron, a pipeline of two": (
        pytest.mark.megatron,
        "cpu_megatron",
        [f"{role}.megatron.pipeline_model_parallel_size=2" for role in ROLES],
    ),
    "VeOmni, two ranks to a row": (
        pytest.mark.veomni,
        "cpu_veomni",
        [
            *(f"{role}.veomni.ulysses_parallel_size=2" for role in ROLES),
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",  # verl has a cosine for this engine, down to 0
            "critic.optim.lr_scheduler_type=constant",
        ],
    ),
}
"""Mark of what else the engine takes, choice of the config group ``local``, and overrides."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=mark) for name, (mark, _, _) in ENGINES.items()])
def jobs(request, tmp_path_factory) -> tuple[JobFacts, JobFacts]:
    """A job with a critic and a reference, and its second half again from its checkpoint."""
    _, local, shape = ENGINES[request.param]
    folder: Path = tmp_path_factory.mktemp("job")
    common = [
        "+padding=prompt",
        "padding.packer=plan",
        "trainer.n_gpus_per_node=4",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=3",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.save_freq={SAVED}",
        *shape,
    ]
    first = run_job(folder / "first", *common, steps=SAVED, local=local)
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    return first, run_job(folder / "resumed", *common, steps=LAST, local=local)


def test_each_batch_takes_the_configured_steps_with_real_rows_in_each(jobs):
    first, resumed = jobs
    assert (sorted(first.metrics), sorted(resumed.metrics)) == ([1, 2], [3])
    pads = 0
    for facts in jobs:
        for metrics in facts.metrics.values():
            assert metrics["padding/actor/optimizer_steps/total"] == 3
            assert metrics["padding/critic/optimizer_steps/total"] == 2
            pads += metrics["padding/pad_rows/total"]
        assert len(facts.optimizer_steps[ACTOR]) == 3 * len(facts.metrics)
        assert len(facts.optimizer_steps[CRITIC]) == 2 * len(facts.metrics)
        assert all(step.moved and step.real_rows > 0 for step in facts.optimizer_steps[ACTOR])
        assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
    assert pads > 0


def test_the_rollout_has_the_weights_of_the_trainer_at_each_step(jobs):
    for facts in jobs:
        for metrics in facts.metrics.values():
            assert metrics["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT


def test_a_resumed_job_trains_on_the_prompts_that_come_next(jobs):
    first, resumed = jobs
    before, after = first.trained_questions(first.metrics), resumed.trained_questions(resumed.metrics)
    assert (len(before), len(after)) == (12, 6)
    assert not set(before) & set(after)
