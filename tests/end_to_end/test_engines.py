"""Whole jobs on other engines: two ranks, or four, two to a row or to a model; trained, saved,
resumed."""

from dataclasses import dataclass

import pytest

from tests.support.jobs import ACTOR, CRITIC, run_job
from tests.support.tolerance import LOG_PROB_AGREEMENT, RELATIVE_METRIC

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SAVED, LAST = 2, 3
WITH_CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=3",
)
ACTOR_AND_REF = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
ROLES = (*ACTOR_AND_REF, "critic")
CONSTANT = "{}.optim.lr_scheduler_type=constant"  # verl has a cosine for VeOmni, down to 0


@dataclass(frozen=True, kw_only=True)
class JobOnEngine:
    """A job with a reference, and with a critic or GRPO."""

    engine: str = "fsdp"
    ranks: int = 4
    shape: list[str]
    critic: bool = False
    experts: bool = False
    """Whether it has a mixture, whose update replays the routes that the pass before it has
    recorded."""


def sizes(setting, roles, size=2):
    return [f"{role}.{setting}={size}" for role in roles]


EXPERTS = [
    *sizes("megatron.expert_model_parallel_size", ACTOR_AND_REF),
    *sizes("megatron.expert_tensor_parallel_size", ACTOR_AND_REF, 1),
    "actor_rollout_ref.actor.megatron.router_replay.mode=R2",
]
PIPELINE, ULYSSES = "megatron.pipeline_model_parallel_size", "veomni.ulysses_parallel_size"
VEOMNI = [
    *sizes(ULYSSES, ROLES),
    CONSTANT.format("actor_rollout_ref.actor"),
    CONSTANT.format("critic"),
]
JOBS = {
    "FSDP2, two ranks to a row": JobOnEngine(
        shape=sizes("ulysses_sequence_parallel_size", ACTOR_AND_REF)
    ),
    "Megatron, a pipeline of two": JobOnEngine(
        engine="megatron", shape=sizes(PIPELINE, ROLES), critic=True
    ),
    "Megatron, experts that two ranks share, GRPO": JobOnEngine(
        engine="megatron", ranks=2, shape=EXPERTS, experts=True
    ),
    "VeOmni, two ranks to a row": JobOnEngine(engine="veomni", shape=VEOMNI, critic=True),
}


def marks_of(job):
    return [] if job.engine == "fsdp" else [getattr(pytest.mark, job.engine)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(job, marks=marks_of(job), id=name) for name, job in JOBS.items()],
)
def job(request):
    return request.param


@pytest.fixture(scope="module")
def jobs(job, tmp_path_factory):
    """The job, and its last step again from the checkpoint before it."""
    folder = tmp_path_factory.mktemp("job")
    checkpoints = folder / "checkpoints"
    common = [
        "+padding=fast",
        "padding.optimizer_steps=configured",
        f"trainer.n_gpus_per_node={job.ranks}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        *(WITH_CRITIC if job.critic else ()),
        *job.shape,
    ]
    saving = (f"trainer.default_local_dir={checkpoints}", f"trainer.save_freq={SAVED}")
    kind = "qwen3_moe" if job.experts else "qwen2"
    on_engine = {
        "local": "cpu" if job.engine == "fsdp" else f"cpu_{job.engine}",
        "model_kind": kind,
        "steps": LAST,
    }
    first = run_job(folder / "first", *common, *saving, **on_engine)
    resuming = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoints / f'global_step_{SAVED}'}",
    )
    again = run_job(folder / "resumed", *common, *resuming, **on_engine)
    return first, again


def test_each_batch_takes_the_configured_steps_with_real_rows_in_each(job, jobs):
    first, resumed = jobs
    assert (sorted(first.metrics), sorted(resumed.metrics)) == ([1, 2, 3], [3])
    steps = {ACTOR: 3, CRITIC: 2} if job.critic else {ACTOR: 3}
    pads = 0
    for facts in jobs:
        for metrics in facts.metrics.values():
            assert metrics["padding/actor/optimizer_steps/total"] == steps[ACTOR]
            assert metrics.get("padding/critic/optimizer_steps/total") == steps.get(CRITIC)
            pads += metrics["padding/pad_rows/total"]
        taken = {
            model: len(steps_of_model) for model, steps_of_model in facts.optimizer_steps.items()
        }
        assert taken == {model: count * len(facts.metrics) for model, count in steps.items()}
        assert all(step.moved and step.real_rows > 0 for step in facts.optimizer_steps[ACTOR])
        assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
    assert pads > 0


def test_the_rollout_has_the_weights_of_the_trainer_at_each_step(jobs):
    for facts in jobs:
        for metrics in facts.metrics.values():
            assert metrics["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT


def test_a_resumed_job_goes_on_as_the_one_that_was_not_ended(job, jobs):
    first, resumed = (facts.metrics[LAST] for facts in jobs)
    # Of several optimizer steps: the later ones tell whether the optimizer's state came back, too.
    for name in ("actor", "critic") if job.critic else ("actor",):
        assert resumed[f"{name}/grad_norm"] == pytest.approx(
            first[f"{name}/grad_norm"], rel=RELATIVE_METRIC
        )
    trained, again = (facts.trained_questions([LAST]) for facts in jobs)
    assert trained == again
    assert len(trained) == 6
    assert not set(trained) & set(jobs[0].trained_questions(range(1, LAST)))
