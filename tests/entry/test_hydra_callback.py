"""A job that verl would refuse before its first step is refused at once, by the code of verl's that would."""

from copy import deepcopy

import pytest
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding.driver.trainers import PaddedTrainerSync
from verl_padding.entry.hydra_callback import CheckJobBeforeStart, verl_refusals
from verl_padding.local.tiny_models import make_tiny_model

ROLLOUT, ACTOR, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MODE = "trainer.v1.trainer_mode"
DISTILLATION = {
    "distillation.enabled": True,
    "distillation.nnodes": 1,
    "distillation.teacher_models.teacher_model.model_path": "m",
}
FILTER = {"algorithm.filter_groups": {"enable": True, "metric": "acc", "max_inflight_gen_batches": 0}}

JOBS = [
    ("verl's trainer", "train_batch_size must equal", {"data.train_batch_size": 32}),
    ("verl's trainer", "max_inflight_gen_batches must be", {MODE: "sync", **FILTER}),
    ("verl's trainer", "Invalid max off policy threshold", {"trainer.v1.sampler.max_off_policy_threshold": 0}),
    ("verl's trainer", "distillation.nnodes must", {**DISTILLATION, "distillation.nnodes": 0}),
    ("verl's estimators and losses", "Unsupported loss mode: x", {f"{ACTOR}.policy_loss.loss_mode": "x"}),
    ("verl's own check", "do_sample", {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.temperature": 0}),
    ("verl's own check", "full_key: actor_rollout_ref.actor.optim", {f"{ACTOR}.optim.warmup_style": "linear"}),
    ("verl's typed configs", "expert_parallel_size must be equal", {f"{ROLLOUT}.expert_parallel_size": 3}),
    ("verl's typed configs", "strategy ddp", {f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.strategy": "ddp"}),
    ("verl's typed configs", "must divide the distillation", {**DISTILLATION, "distillation.n_gpus_per_node": 3}),
]
"""Part of verl, words of its refusal, and what the job has, beside what runs."""


@pytest.fixture(scope="module")
def job_that_runs(tmp_path_factory):
    """verl's own: what the plug-in refuses, or lifts, is not in the way."""
    model = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    return compose_job(
        *DYNAMIC,
        *SEPARATE,
        f"{MODE}=separate_async",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n_gpus_per_node=8",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
    )


def job_with(job, settings):
    config = deepcopy(job)
    with open_dict(config):
        for setting, value in settings.items():
            OmegaConf.update(config, setting, value, force_add=True)
    return config


def parts_that_refuse(job, settings) -> list[str]:
    return [part for part, _ in verl_refusals(job_with(job, settings))]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_job_that_the_others_are_made_of_runs(mode, job_that_runs):
    assert parts_that_refuse(job_that_runs, {MODE: mode}) == []


@pytest.mark.parametrize(("part", "words", "settings"), JOBS)
def test_what_verl_refuses_is_reported_in_verls_words(part, words, settings, job_that_runs):
    assert words in str(dict(verl_refusals(job_with(job_that_runs, settings)))[part])


class OwnSamplerOfARunningJob(ReplayBuffer):
    """Asks for what is there only once the job runs."""

    def __init__(self, **_):
        raise AssertionError("Please initialize the TransferQueue first")


def own_sampler(name: str) -> dict:
    return {"trainer.v1.sampler.custom_sampler": {"path": __file__, "name": name}}


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_sampler_of_somebodys_own_is_made_by_the_job_alone(mode, job_that_runs):
    settings = {MODE: mode, **own_sampler("OwnSamplerOfARunningJob")}
    assert parts_that_refuse(job_that_runs, settings) == []
    assert parts_that_refuse(job_that_runs, settings | {"padding": {"strategy": "prompt"}}) == []
    assert parts_that_refuse(job_that_runs, settings | FILTER) == []


@pytest.mark.parametrize(
    "own",
    [
        {"data.custom_cls": {"path": __file__, "name": "OwnData"}},
        own_sampler("OwnSamplerOfARunningJob"),
        {"trainer.checkpoint_callback_class": "mine.Callback"},
        {f"{ROLLOUT}.agent.agent_loop_manager_class": "mine.Manager"},
    ],
    ids=lambda own: next(iter(own)),
)
def test_an_estimator_may_be_registered_by_what_the_trainer_loads(own, job_that_runs):
    unknown = {"algorithm.adv_estimator": "mine"}
    assert parts_that_refuse(job_that_runs, {**unknown, **own}) == []
    assert parts_that_refuse(job_that_runs, unknown) == ["verl's estimators and losses"]
    # Workers, which look up losses, load none of these.
    loss = {f"{ACTOR}.policy_loss.loss_mode": "x", **own}
    assert "verl's estimators and losses" in parts_that_refuse(job_that_runs, loss)


def test_all_refusals_are_reported_and_leave_the_config_as_it_was(job_that_runs):
    config = job_with(job_that_runs, {f"{ROLLOUT}.expert_parallel_size": 3, "algorithm.adv_estimator": "mine"})
    before = OmegaConf.to_yaml(config)
    assert [part for part, _ in verl_refusals(config)] == ["verl's typed configs", "verl's estimators and losses"]
    assert OmegaConf.to_yaml(config) == before


def test_a_padded_job_is_refused_before_ray_starts_and_in_verls_words(job_that_runs):
    config = job_with(job_that_runs, {"padding": {"strategy": "prompt"}, "data.train_batch_size": 128})
    message = r"^verl_padding: verl's trainer refuses this job: AssertionError: train_batch"
    with pytest.raises(SystemExit, match=message):
        CheckJobBeforeStart().on_job_start(config)


def test_what_a_lora_job_makes_no_model_of_is_not_checked(job_that_runs):
    settings = {f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.strategy": "ddp"}
    settings["actor_rollout_ref.model.lora_rank"] = 8
    assert "verl's typed configs" not in parts_that_refuse(job_that_runs, settings)


def test_a_trainer_of_somebodys_own_is_not_made_by_the_check(job_that_runs, monkeypatch):
    made = []

    class Mine(PaddedTrainerSync):
        def __init__(self, config):
            made.append(self)
            super().__init__(config)

    monkeypatch.setitem(TRAINER_REGISTRY, "mine_made_where_the_job_runs", Mine)
    job = {MODE: "mine_made_where_the_job_runs", "padding": {"strategy": "prompt"}}
    assert parts_that_refuse(job_that_runs, job) == []
    threshold = {"trainer.v1.sampler.max_off_policy_threshold": 0}
    assert parts_that_refuse(job_that_runs, job | threshold) == ["verl's trainer"]
    assert made == []


def test_a_refusal_of_the_plugins_own_is_not_reported_twice(job_that_runs):
    assert parts_that_refuse(job_that_runs, {"padding": {"strategy": "none"}}) == []


@pytest.mark.parametrize("flag", ["padding.strategy=nonsense", "data.train_batch_size=1000"])
def test_a_job_that_cannot_run_ends_before_ray_starts(flag):
    config = compose_job("+padding=prompt", flag)
    with pytest.raises(SystemExit, match=r"^verl_padding: "):
        CheckJobBeforeStart().on_job_start(config)
