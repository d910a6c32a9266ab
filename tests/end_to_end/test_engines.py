"""Whole jobs on other engines: two ranks, or four, two to a row or to a model; trained, saved, resumed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.jobs import ACTOR, CRITIC, JobFacts, run_job
from tests.support.tolerance import LOG_PROB_AGREEMENT, RELATIVE_METRIC
from verl_padding.local.tiny_models import TinyModelKind

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SAVED, LAST = 2, 3
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
WITH_CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_mini_batch_size=3")
CONSTANT = "{}.optim.lr_scheduler_type=constant"
"""verl has a cosine for VeOmni, down to 0."""


@dataclass(frozen=True, kw_only=True)
class JobOnEngine:
    """A job with a reference, and with a critic or GRPO."""

    marks: tuple[pytest.MarkDecorator, ...] = ()
    """What else the engine takes."""
    local: str = "cpu"
    """Choice of the config group ``local``."""
    ranks: int = 4
    shape: tuple[str, ...]
    """Overrides."""
    critic: bool = True
    model_kind: TinyModelKind = "qwen2"
    replays: bool = False
    """Whether the update replays the routes that the pass before it has recorded."""


JOBS = {
    "FSDP2, two ranks to a row": JobOnEngine(
        shape=(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
        ),
        critic=False,
    ),
    "Megatron, a pipeline of two": JobOnEngine(
        marks=(pytest.mark.megatron,),
        local="cpu_megatron",
        shape=tuple(f"{role}.megatron.pipeline_model_parallel_size=2" for role in ROLES),
    ),
    "Megatron, a pipeline of two, GRPO": JobOnEngine(
        marks=(pytest.mark.megatron,),
        local="cpu_megatron",
        shape=tuple(f"{role}.megatron.pipeline_model_parallel_size=2" for role in ROLES[:2]),
        critic=False,
    ),
    "Megatron, experts that two ranks share, GRPO": JobOnEngine(
        marks=(pytest.mark.megatron,),
        local="cpu_megatron",
        ranks=2,
        shape=(
            *(f"{role}.megatron.expert_model_parallel_size=2" for role in ROLES[:2]),
            *(f"{role}.megatron.expert_tensor_parallel_size=1" for role in ROLES[:2]),
            "actor_rollout_ref.actor.megatron.router_replay.mode=R2",
        ),
        critic=False,
        model_kind="qwen3_moe",
        replays=True,
    ),
    "VeOmni, two ranks to a row": JobOnEngine(
        marks=(pytest.mark.veomni,),
        local="cpu_veomni",
        shape=(
            *(f"{role}.veomni.ulysses_parallel_size=2" for role in ROLES),
            CONSTANT.format("actor_rollout_ref.actor"),
            CONSTANT.format("critic"),
        ),
    ),
    "VeOmni, two ranks, GRPO": JobOnEngine(
        marks=(pytest.mark.veomni,),
        local="cpu_veomni",
        ranks=2,
        shape=(CONSTANT.format("actor_rollout_ref.actor"),),
        critic=False,
    ),
}


@pytest.fixture(scope="module", params=[pytest.param(job, marks=job.marks, id=name) for name, job in JOBS.items()])
def job(request) -> JobOnEngine:
    return request.param


@pytest.fixture(scope="module")
def jobs(job, tmp_path_factory) -> tuple[JobFacts, JobFacts]:
    """The job, and its last step again from the checkpoint before it."""
    folder: Path = tmp_path_factory.mktemp("job")
    checkpoints = folder / "checkpoints"
    common = [
        "+padding=prompt",
        "padding.packer=plan",
        f"trainer.n_gpus_per_node={job.ranks}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        *(WITH_CRITIC if job.critic else ()),
        *job.shape,
    ]
    saving = (f"trainer.default_local_dir={checkpoints}", f"trainer.save_freq={SAVED}")
    first = run_job(folder / "first", *common, *saving, steps=LAST, local=job.local, model_kind=job.model_kind)
    resuming = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints / f'global_step_{SAVED}'}")
    again = run_job(folder / "resumed", *common, *resuming, steps=LAST, local=job.local, model_kind=job.model_kind)
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
        taken = {model: len(steps_of_model) for model, steps_of_model in facts.optimizer_steps.items()}
        assert taken == {model: count * len(facts.metrics) for model, count in steps.items()}
        assert all(step.moved and step.real_rows > 0 for step in facts.optimizer_steps[ACTOR])
        assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
        assert any(step.pad_routes for step in facts.optimizer_steps[ACTOR]) == job.replays
    assert pads > 0


def test_the_rollout_has_the_weights_of_the_trainer_at_each_step(jobs):
    for facts in jobs:
        for metrics in facts.metrics.values():
            assert metrics["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT


def test_a_resumed_job_goes_on_as_the_one_that_was_not_ended(job, jobs):
    first, resumed = (facts.metrics[LAST] for facts in jobs)
    # Of several optimizer steps: the later ones tell whether the optimizer's state came back, too.
    for name in ("actor", "critic") if job.critic else ("actor",):
        assert resumed[f"{name}/grad_norm"] == pytest.approx(first[f"{name}/grad_norm"], rel=RELATIVE_METRIC)
    trained, again = (facts.trained_questions([LAST]) for facts in jobs)
    assert trained == again
    assert len(trained) == 6
    assert not set(trained) & set(jobs[0].trained_questions(range(1, LAST)))
