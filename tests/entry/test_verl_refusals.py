"""A job that verl would refuse before its first step is refused at once, by the code of verl's that would.

Each refusal of verl's is enumerated from its source, and met by a job, or said why no job can meet it here.
"""

import ast
import re
import traceback
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import verl
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.support.losses_on_rows import MODES
from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding.driver.trainers import PaddedTrainerSync
from verl_padding.entry.hydra_callback import CheckJobBeforeStart
from verl_padding.entry.verl_refusals import CALLS, verl_refusals
from verl_padding.local.tiny_models import make_tiny_model

ROOT = Path(verl.__file__).parent
ROLLOUT, ACTOR, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MODE, SWITCH = "trainer.v1.trainer_mode", "trainer.v1.separate_async.hybrid_rollout"
FIXED = {
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
    f"{REF}.log_prob_micro_batch_size_per_gpu": 4,
}
CRITIC = {"critic.enable": True, "algorithm.adv_estimator": "gae"}
DISTILLATION = {
    "distillation.enabled": True,
    "distillation.nnodes": 1,
    "distillation.teacher_models.teacher_model.model_path": "m",
}
FILTER = {"algorithm.filter_groups": {"enable": True, "metric": "acc"}}
SPLIT = f"{ROLLOUT}.disaggregation"

JOBS = [
    # the trainers' constructors
    ("verl's trainer", "train_batch_size must equal", {"data.train_batch_size": 32}),
    ("verl's trainer", "nnodes must be > 0 in", {f"{ROLLOUT}.nnodes": 0}),
    ("verl's trainer", "n_gpus_per_node must be > 0 in", {f"{ROLLOUT}.n_gpus_per_node": 0}),
    ("verl's trainer", "please use nccl", {f"{ROLLOUT}.checkpoint_engine.backend": "naive"}),
    ("verl's trainer", "Colocate reward model", {"reward.reward_model.enable": True}),
    (
        "verl's trainer",
        "does not support rollout disaggregation",
        {f"{SWITCH}.enable_switch": True, f"{SPLIT}.enabled": True},
    ),
    (
        "verl's trainer",
        "must implement",
        {
            f"{SWITCH}.enable_switch": True,
            "trainer.v1.sampler.custom_sampler": {"path": __file__, "name": "OwnSampler"},
        },
    ),
    ("verl's trainer", "switch_threshold_ratio must be in", {f"{SWITCH}.switch_threshold_ratio": 2.0}),
    ("verl's trainer", "switch_cost_window_size must be", {f"{SWITCH}.switch_cost_window_size": 0}),
    (
        "verl's trainer",
        "filter_groups.metric must be set",
        {"algorithm.filter_groups": {"enable": True, "metric": None}},
    ),
    ("verl's trainer", "requires the reward metric", {MODE: "sync", **FILTER, "reward.reward_model.enable": True}),
    (
        "verl's trainer",
        "max_inflight_gen_batches must be",
        {MODE: "sync", "algorithm.filter_groups": {"enable": True, "metric": "acc", "max_inflight_gen_batches": 0}},
    ),
    ("verl's trainer", "Invalid max off policy threshold", {"trainer.v1.sampler.max_off_policy_threshold": 0}),
    ("verl's trainer", "Invalid max off policy strategy", {"trainer.v1.sampler.max_off_policy_strategy": "keep"}),
    (
        "verl's trainer",
        "reward_model.n_gpus_per_node must",
        {"reward.reward_model.enable_resource_pool": True, "reward.reward_model.n_gpus_per_node": 0},
    ),
    (
        "verl's trainer",
        "reward_model.nnodes must",
        {
            "reward.reward_model.enable_resource_pool": True,
            "reward.reward_model.n_gpus_per_node": 1,
            "reward.reward_model.nnodes": 0,
        },
    ),
    ("verl's trainer", "distillation.n_gpus_per_node must", {**DISTILLATION, "distillation.n_gpus_per_node": 0}),
    ("verl's trainer", "distillation.nnodes must", {**DISTILLATION, "distillation.nnodes": 0}),
    # the check of main_ppo
    # the losses, each with settings of its own
    ("verl's policy loss", "lower bound of the clip_ratio_c", {f"{ACTOR}.clip_ratio_c": 1.0}),
    ("verl's policy loss", "dro_beta must be a positive value", {f"{ACTOR}.policy_loss.loss_mode": "dro"}),
    ("verl's own check", "real_train_batch_size", {MODE: "sync", **FIXED, "data.train_batch_size": 20}),
    ("verl's own check", "do_sample", {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.temperature": 0}),
    (
        "verl's own check",
        "[actor_rollout_ref.rollout] Please set at least one",
        {**FIXED, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None},
    ),
    (
        "verl's own check",
        "You have set both 'actor_rollout_ref.rollout",
        {**FIXED, f"{ROLLOUT}.log_prob_micro_batch_size": 4},
    ),
    (
        "verl's own check",
        "must be >= actor.ppo_mini_batch_size",
        {MODE: "sync", **FIXED, f"{ACTOR}.ppo_mini_batch_size": 128},
    ),
    ("verl's own check", "[actor] You have set both", {**FIXED, f"{ACTOR}.ppo_micro_batch_size": 4}),
    ("verl's own check", "[actor] Please set at least one", {**FIXED, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}),
    (
        "verl's own check",
        "must be divisible by ppo_micro_batch_size",
        {**FIXED, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None, f"{ACTOR}.ppo_micro_batch_size": 5},
    ),
    (
        "verl's own check",
        "must be >= n_gpus",
        {**FIXED, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None, f"{ACTOR}.ppo_micro_batch_size": 4},
    ),
    ("verl's own check", "Invalid loss_agg_mode", {f"{ACTOR}.loss_agg_mode": "mean"}),
    (
        "verl's own check",
        "you must enable `use_remove_padding`",
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
    ),
    (
        "verl's own check",
        "Invalid router_replay mode",
        {f"{ACTOR}.fsdp_config.router_replay": {"_target_": "verl.workers.config.RouterReplayConfig", "mode": "R4"}},
    ),
    (
        "verl's own check",
        "requires algorithm.rollout_correction.bypass_mode=False",
        {
            f"{ACTOR}.fsdp_config.router_replay": {"_target_": "verl.workers.config.RouterReplayConfig", "mode": "R2"},
            "algorithm.rollout_correction": {"bypass_mode": True},
        },
    ),
    ("verl's own check", "strategy ddp not supported", {f"{ACTOR}.fsdp_config.strategy": "ddp"}),
    ("verl's own check", "[critic] Please set at least one", {**FIXED, **CRITIC}),
    (
        "verl's own check",
        "[critic] You have set both",
        {**FIXED, **CRITIC, "critic.ppo_micro_batch_size": 4, "critic.ppo_micro_batch_size_per_gpu": 4},
    ),
    (
        "verl's own check",
        "[critic] ppo_mini_batch_size",
        {**FIXED, **CRITIC, "critic.ppo_micro_batch_size": 5, "critic.ppo_micro_batch_size_per_gpu": None},
    ),
    (
        "verl's own check",
        "critic.ppo_micro_batch_size (4) *",
        {**FIXED, **CRITIC, "critic.ppo_micro_batch_size": 4, "critic.ppo_micro_batch_size_per_gpu": None},
    ),
    (
        "verl's own check",
        "critic.ppo_mini_batch_size (128)",
        {MODE: "sync", **FIXED, **CRITIC, "critic.ppo_mini_batch_size": 128, "critic.ppo_micro_batch_size_per_gpu": 4},
    ),
    (
        "verl's own check",
        "FSDPOptimizerConfig':\nAssertionError()\nfull_key: actor_rollout_ref.actor.optim",
        {f"{ACTOR}.optim.lr_scheduler_type": "linear"},
    ),
    ("verl's own check", "full_key: actor_rollout_ref.actor.optim", {f"{ACTOR}.optim.warmup_style": "linear"}),
    # the rollout
    ("verl's rollout", "Rollout mode 'sync' has been removed", {f"{ROLLOUT}.mode": "sync"}),
    ("verl's rollout", "expert_parallel_size must be equal", {f"{ROLLOUT}.expert_parallel_size": 3}),
    ("verl's rollout", "moe_tensor_parallel_size is only", {f"{ROLLOUT}.moe_tensor_parallel_size": 2}),
    (
        "verl's rollout",
        "moe_tensor_parallel_size * expert_parallel_size",
        {f"{ROLLOUT}.name": "trtllm", f"{ROLLOUT}.moe_tensor_parallel_size": 2, f"{ROLLOUT}.expert_parallel_size": 8},
    ),
    ("verl's rollout", "pipeline_model_parallel_size > 1 yet", {f"{ROLLOUT}.pipeline_model_parallel_size": 2}),
    (
        "verl's rollout",
        "rollout.disaggregation.enabled=True requires",
        {f"{ROLLOUT}.name": "hf", f"{SPLIT}.enabled": True},
    ),
    (
        "verl's rollout",
        "disaggregation.transfer_backend=",
        {f"{SPLIT}.enabled": True, f"{SPLIT}.transfer_backend": "pigeon"},
    ),
    ("verl's rollout", "disaggregation requires >=1", {f"{SPLIT}.enabled": True, f"{SPLIT}.prefill_replicas": 0}),
    ("verl's rollout", "bootstrap_port out of range", {f"{SPLIT}.enabled": True, f"{SPLIT}.bootstrap_port": 0}),
    (
        "verl's rollout",
        "disaggregation.mooncake_protocol=",
        {f"{SPLIT}.enabled": True, f"{SPLIT}.transfer_backend": "mooncake", f"{SPLIT}.mooncake_protocol": "p"},
    ),
    ("verl's rollout", "`max_samples_per_step_per_worker`", {f"{ROLLOUT}.trace.max_samples_per_step_per_worker": -1}),
    # the reference
    (
        "verl's reference",
        "strategy ddp not supported",
        {f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.strategy": "ddp"},
    ),
    # the reward manager
    (
        "verl's reward manager",
        "max_resp_len must be larger than overlong_buffer.len",
        {
            "reward.reward_manager.name": "dapo",
            "reward.reward_kwargs": {"max_resp_len": 64, "overlong_buffer_cfg": {"enable": True, "len": 4096}},
        },
    ),
    # distillation
    (
        "verl's distillation",
        "Only vanilla policy loss",
        {**DISTILLATION, "distillation.distillation_loss.policy_loss_mode": "gspo"},
    ),
    (
        "verl's distillation",
        "Directly backpropagating k1",
        {**DISTILLATION, "distillation.distillation_loss.loss_mode": "k1"},
    ),
    (
        "verl's distillation",
        "model_path must be specified",
        {**DISTILLATION, "distillation.teacher_models.teacher_model.model_path": None},
    ),
    ("verl's distillation", "must divide the distillation", {**DISTILLATION, "distillation.n_gpus_per_node": 3}),
    (
        "verl's distillation",
        "requires room for the student prompt",
        {**DISTILLATION, "distillation.teacher_models.teacher_model.inference.max_model_len": 8},
    ),
    (
        "verl's distillation",
        "topk must be specified",
        {
            **DISTILLATION,
            "distillation.distillation_loss.loss_mode": "forward_kl_topk",
            "distillation.distillation_loss.topk": None,
        },
    ),
    (
        "verl's distillation",
        "VLLM max_logprobs (4)",
        {
            **DISTILLATION,
            "distillation.distillation_loss.loss_mode": "forward_kl_topk",
            "distillation.teacher_models.teacher_model.inference.engine_kwargs": {"vllm": {"max_logprobs": 4}},
        },
    ),
    (
        "verl's distillation",
        "does not support inference engine",
        {**DISTILLATION, "distillation.distillation_loss.loss_mode": "forward_kl_topk", f"{ROLLOUT}.name": "hf"},
    ),
    # skipped rollouts
    ("verl's skipped rollouts", "`action` must be one of", {"skip.rollout_tq.action": "random"}),
]
"""Part of verl, words of its refusal, and what the job has, beside what runs."""

SOURCES = {
    "trainer/ppo/v1/trainer_base.py": "__init__|_build_replay_buffer|_resolve_filter_.*|_init_resource_pool_mgr",
    "trainer/ppo/v1/trainer_separate_async.py": "__init__",
    "trainer/ppo/v1/trainer_colocate_async.py": "__init__",
    "trainer/ppo/v1/trainer_sync.py": "__init__",
    "trainer/ppo/v1/replay_buffer.py": "__init__|_validate_mode_config",
    "trainer/config/config.py": "__post_init__",
    "utils/config.py": "validate_config|check_mutually_exclusive|_validate_router_replay_config",
    "utils/skip/config.py": "__post_init__",
    "workers/config/actor.py": ".*",
    "workers/config/critic.py": ".*",
    "workers/config/rollout.py": ".*",
    "workers/config/disaggregation.py": ".*",
    "workers/config/distillation.py": ".*",
}
"""verl's code that may refuse before workers start, by file; functions by a pattern of their names.

The classes of engines and optimizers are made with their roles, as two of the jobs above show."""

UNMET = Counter(
    {
        # The trainer always gives a function to refill by, and one prompt at a time where that is asked for.
        ("trainer/ppo/v1/replay_buffer.py", "__init__"): 2,
        ("trainer/ppo/v1/replay_buffer.py", "_validate_mode_config"): 1,
        # Megatron's section, which is in another of verl's primary configs.
        ("utils/config.py", "validate_config"): 1,
        # OmegaConf refuses values of another type first; the classes of the other two trainers say the same.
        ("utils/skip/config.py", "__post_init__"): 14,
        # MISSING, which OmegaConf refuses first, and VeOmni's.
        ("workers/config/actor.py", "__post_init__"): 3,
        ("workers/config/critic.py", "__post_init__"): 1,
        ("workers/config/critic.py", "validate"): 1,
        ("workers/config/rollout.py", "__post_init__"): 1,
        # Nobody calls it.
        ("workers/config/actor.py", "_check_mutually_exclusive"): 2,
        # Several teachers.
        ("workers/config/distillation.py", "check_configured"): 2,
        ("workers/config/distillation.py", "_resolve_teacher_models"): 2,
        ("workers/config/distillation.py", "__post_init__"): 1,
    }
)
"""Refusals that no job here can meet, by file and function, and why."""


class OwnSampler:
    """A replay buffer of somebody's own, which cannot wait."""

    def __init__(self, **_):
        pass


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


def refusal_of(call, config) -> Exception | None:
    try:
        call(config)
    except Exception as error:
        return error
    return None


def place_of(error: BaseException) -> tuple[str, int]:
    """File and line of verl's that refused; Hydra wraps what a config class raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
    assert frames, error
    return Path(frames[-1].filename).relative_to(ROOT).as_posix(), frames[-1].lineno


def refusals_in_verl() -> dict[tuple[str, int], str]:
    """(file, line) -> function, of each raise and assert in what verl runs before a job's workers start."""
    found = {}
    for file, functions in SOURCES.items():
        tree = ast.parse((ROOT / file).read_text())
        for holder in ast.walk(tree):
            if not isinstance(holder, ast.FunctionDef) or not re.fullmatch(functions, holder.name):
                continue
            for node in ast.walk(holder):
                if isinstance(node, ast.Raise | ast.Assert):
                    found[file, node.lineno] = holder.name
    return found


def test_the_job_that_the_others_are_made_of_runs(job_that_runs):
    assert list(verl_refusals(job_that_runs)) == []
    for mode in ("sync", "colocate_async"):
        assert list(verl_refusals(job_with(job_that_runs, {MODE: mode}))) == []


def test_every_refusal_of_verl_is_met_by_a_job_and_told_in_verls_words(job_that_runs):
    met, wrong = set(), []
    for part, words, settings in JOBS:
        refusal = refusal_of(CALLS[part], job_with(job_that_runs, settings))
        if refusal is None or words not in str(refusal):
            wrong.append((words, refusal))
        else:
            met.add(place_of(refusal))
    assert wrong == []
    refusals = refusals_in_verl()
    assert Counter((place[0], function) for place, function in refusals.items() if place not in met) == UNMET
    assert len(refusals) - UNMET.total() > 50


@pytest.mark.parametrize("name", POLICY_LOSS_REGISTRY)
def test_no_loss_of_verls_is_refused_with_what_it_needs(name, job_that_runs):
    needs = {"dro": {f"{ACTOR}.policy_loss.dro_beta": 0.5}}.get(name, {})
    for aggregation in MODES:
        settings = {f"{ACTOR}.policy_loss.loss_mode": name, f"{ACTOR}.loss_agg_mode": aggregation, **needs}
        assert refusal_of(CALLS["verl's policy loss"], job_with(job_that_runs, settings)) is None


def test_no_reward_manager_of_verls_is_refused_as_it_comes(job_that_runs):
    from verl.experimental.reward_loop.reward_manager import registry

    names = list(registry.REWARD_MANAGER)
    assert {"naive", "dapo", "remote", "rate_limited"} <= set(names)
    for name in names:
        assert list(verl_refusals(job_with(job_that_runs, {"reward.reward_manager.name": name}))) == [], name


class OwnSamplerOfARunningJob(ReplayBuffer):
    """Asks for what is there only once the job runs."""

    def __init__(self, **_):
        raise AssertionError("Please initialize the TransferQueue first")


def own_sampler(name: str) -> dict:
    return {"trainer.v1.sampler.custom_sampler": {"path": __file__, "name": name}}


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_sampler_of_somebodys_own_is_made_by_the_job_alone(mode, job_that_runs):
    settings = {MODE: mode, **own_sampler("OwnSamplerOfARunningJob")}
    assert list(verl_refusals(job_with(job_that_runs, settings))) == []
    assert list(verl_refusals(job_with(job_that_runs, settings | {"padding": {"strategy": "prompt"}}))) == []
    missing = own_sampler("NoSuchSampler")
    assert [part for part, _ in verl_refusals(job_with(job_that_runs, missing))] == ["verl's trainer"]


ESTIMATOR = "algorithm.adv_estimator"


@pytest.mark.parametrize(
    "own",
    [
        {"data.custom_cls": {"path": __file__, "name": "OwnData"}},
        own_sampler("OwnSampler"),
        {"trainer.checkpoint_callback_class": "mine.Callback"},
        {f"{ROLLOUT}.agent.agent_loop_manager_class": "mine.Manager"},
    ],
    ids=lambda own: next(iter(own)),
)
def test_an_estimator_may_be_registered_by_what_the_trainer_loads_and_a_loss_may_not(own, job_that_runs):
    mine = {ESTIMATOR: "mine", **own}
    assert list(verl_refusals(job_with(job_that_runs, mine))) == []
    ((part, unknown),) = verl_refusals(job_with(job_that_runs, {ESTIMATOR: "mine"}))
    assert (part, f"{ESTIMATOR}=mine" in str(unknown)) == ("verl's estimators and losses", True)
    # Workers, which look up losses, load none of these.
    refused = [
        part for part, _ in verl_refusals(job_with(job_that_runs, {f"{ACTOR}.policy_loss.loss_mode": "x", **own}))
    ]
    assert "verl's estimators and losses" in refused


def test_a_refusal_comes_once_and_leaves_the_config_as_it_was(job_that_runs):
    config = job_with(job_that_runs, {f"{ROLLOUT}.mode": "sync", "skip.rollout_tq.action": "random"})
    before = OmegaConf.to_yaml(config)
    assert [part for part, _ in verl_refusals(config)] == ["verl's rollout", "verl's skipped rollouts"]
    assert OmegaConf.to_yaml(config) == before


def test_a_padded_job_is_refused_before_ray_starts_and_in_verls_words(job_that_runs):
    config = job_with(job_that_runs, {"padding": {"strategy": "prompt"}, "data.train_batch_size": 128})
    with pytest.raises(
        SystemExit, match=r"^verl_padding: verl's trainer refuses this job: AssertionError: train_batch"
    ):
        CheckJobBeforeStart().on_job_start(config)


def test_what_a_lora_job_makes_no_model_of_is_not_looked_at(job_that_runs):
    settings = {f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.strategy": "ddp"}
    assert [part for part, _ in verl_refusals(job_with(job_that_runs, settings))] == ["verl's reference"]
    settings["actor_rollout_ref.model.lora_rank"] = 8
    # LoRA in the rollout takes vLLM or SGLang, which verl's own check looks for.
    assert "verl's reference" not in [part for part, _ in verl_refusals(job_with(job_that_runs, settings))]


def test_a_trainer_of_somebodys_own_is_not_made_by_the_check(job_that_runs, monkeypatch):
    made = []

    class Mine(PaddedTrainerSync):
        def __init__(self, config):
            made.append(self)
            super().__init__(config)

    monkeypatch.setitem(TRAINER_REGISTRY, "mine_made_where_the_job_runs", Mine)
    job = {MODE: "mine_made_where_the_job_runs", "padding": {"strategy": "prompt"}}
    assert list(verl_refusals(job_with(job_that_runs, job))) == []
    refusals = list(verl_refusals(job_with(job_that_runs, job | {"trainer.v1.sampler.max_off_policy_threshold": 0})))
    assert [part for part, _ in refusals] == ["verl's trainer"]
    assert made == []


def test_a_refusal_of_the_plugins_own_is_not_told_twice(job_that_runs):
    assert list(verl_refusals(job_with(job_that_runs, {"padding": {"strategy": "none"}}))) == []
