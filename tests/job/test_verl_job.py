"""What is read from a verl config, and which jobs are refused before any worker starts."""

import json
from copy import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import transformers

from tests.job.test_savings import FIXED as FIXED_SIZES
from tests.support.verl_config import compose_padded
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR, LOG_PROB, REF, VALUES
from verl_padding.job.role_engine import RoleEngine
from verl_padding.job.verl_job import MIN_BRANCH_TOKENS, VerlJob
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.plan import Pass
from verl_padding.plan.planner import reuses_layout_of

A, R, REF_ = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, GAE, KL = "actor_rollout_ref.model", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true"
PLAN = "padding.packer=plan"
SHARING = (PLAN, "padding.sharing=on")
FIXED = (*FIXED_SIZES, f"{REF_}.log_prob_micro_batch_size_per_gpu=16")


def job_of(*overrides, updates_actor=True):
    return check_job(compose_padded(*overrides)).planner_job(updates_actor=updates_actor)


def test_budgets_and_data_parallel_sizes_follow_the_sequence_parallel_size():
    job = job_of(
        f"{A}.ulysses_sequence_parallel_size=2",
        f"{A}.ppo_max_token_len_per_gpu=1000",
        f"{R}.log_prob_max_token_len_per_gpu=3000",
        KL,
        f"{REF_}.log_prob_max_token_len_per_gpu=5000",
        f"{REF_}.ulysses_sequence_parallel_size=1",
    )
    assert (job.updates[ACTOR].dp_size, job.updates[ACTOR].token_budget) == (4, 2000)
    assert (job.inference[LOG_PROB].dp_size, job.inference[LOG_PROB].token_budget) == (4, 6000)
    assert (job.inference[REF].dp_size, job.inference[REF].token_budget) == (8, 5000)
    assert job.updates[ACTOR].budget_setting == f"{A}.ppo_max_token_len_per_gpu"


def test_fixed_micro_batches_become_multiples_of_a_local_batch():
    job = job_of(*FIXED, KL)
    assert (job.updates[ACTOR].local_batch_multiple, job.updates[ACTOR].token_budget) == (4, None)
    assert job.inference[LOG_PROB] == Pass(dp_size=8, micro_batch_rows=8, as_update=ACTOR)
    assert job.inference[REF] == Pass(dp_size=8, micro_batch_rows=16, as_update=ACTOR)


@pytest.mark.parametrize(
    ("overrides", "taken"),
    [
        ((PLAN,), {LOG_PROB: ACTOR, REF: ACTOR, VALUES: None}),
        ((), {LOG_PROB: None, REF: None, VALUES: None}),  # what verl's packer will do is not known
        ((PLAN, f"{R}.log_prob_max_token_len_per_gpu=20000"), {LOG_PROB: None, REF: ACTOR}),
        ((PLAN, f"{REF_}.ulysses_sequence_parallel_size=2"), {LOG_PROB: ACTOR, REF: None}),
        (FIXED, {LOG_PROB: None, REF: None}),
        # Small mini-batches are full of pads, which a pass can do without.
        ((*FIXED, f"{R}.log_prob_micro_batch_size_per_gpu=4"), {LOG_PROB: None, REF: None}),
    ],
)
def test_a_log_prob_pass_takes_the_updates_micro_batches_where_it_can(overrides, taken):
    critic = (GAE, "critic.ppo_micro_batch_size_per_gpu=4")
    job = job_of(*overrides, *critic, KL)
    assert {name: reuses_layout_of(job, job.inference[name]) for name in taken} == taken
    warming_up = job_of(*overrides, *critic, updates_actor=False)
    assert reuses_layout_of(warming_up, warming_up.inference[LOG_PROB]) is None


@pytest.mark.parametrize(
    "without",
    [
        ("algorithm.rollout_correction.bypass_mode=true",),
        (
            "padding.recompute_old_log_probs=false",
            f"{R}.calculate_log_probs=false",
            "data.train_batch_size=8",
            f"{A}.ppo_mini_batch_size=8",
        ),
    ],
)
def test_a_log_prob_pass_is_left_out_but_for_a_lora_actors_reference(without):
    assert list(job_of(*without).inference) == []
    assert list(job_of(*without, KL).inference) == [REF]
    assert list(job_of(*without, KL, f"{MODEL}.lora_rank=8").inference) == [LOG_PROB]


HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_rows_that_branch_in_a_model_with_states_take_more_tokens(tmp_path):
    for config, keeps_states in (
        (transformers.Qwen2Config(), False),
        (transformers.Qwen3NextConfig(**HYBRID), True),
        (transformers.Qwen3_5Config(text_config=HYBRID), True),
    ):
        config.save_pretrained(tmp_path)
        job = check_job(compose_padded(f"{MODEL}.path={tmp_path}", *SHARING))
        tokens = job.planner_job().updates["actor"].min_branch_tokens
        assert tokens == (MIN_BRANCH_TOKENS if keeps_states else 1)


ULYSSES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    f"+{MODEL}.override_config.attn_implementation=flash_attention_2",
)


def test_linear_attention_over_ulysses_ranks_is_verls_or_refused(tmp_path):
    transformers.Qwen3_5Config(text_config=HYBRID).save_pretrained(tmp_path)
    check_job(compose_padded(f"{MODEL}.path={tmp_path}", *SHARING, *ULYSSES))
    for config in (
        transformers.Qwen3NextConfig(**HYBRID),
        transformers.Qwen3_5TextConfig(**HYBRID),
        transformers.OlmoHybridConfig(**HYBRID),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(PaddingConfigError, match=f"{config.model_type}: .* Ulysses"):
            check_job(compose_padded(f"{MODEL}.path={tmp_path}", *ULYSSES))


def test_a_critic_that_has_to_be_fetched_is_checked_by_the_trainer(tmp_path, monkeypatch):
    actor, critic = (
        make_tiny_model("qwen2", tmp_path / "actor"),
        make_tiny_model("qwen2", tmp_path / "critic"),
    )
    config = json.loads((critic / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (critic / "config.json").write_text(json.dumps(config))
    fetched = {
        "hdfs://models/critic": str(critic),
        "hdfs://models/nothing": str(tmp_path / "nothing"),
    }
    monkeypatch.setattr("verl.utils.fs.copy_to_local", lambda path: fetched.get(path, path))
    overrides = [GAE, f"{MODEL}.path={actor}"]
    for path, settings, message in (
        (
            "hdfs://models/critic",
            SHARING,
            r"critic.model.path=.*rope_type='dynamic'",
        ),
        (
            "hdfs://models/nothing",
            (),
            r"^critic.model.path=hdfs://models/nothing: its config cannot be read",
        ),
    ):
        job = compose_padded(*overrides, f"critic.model.path={path}", *settings)
        padding = check_job(job).padding
        with pytest.raises(PaddingConfigError, match=message):
            VerlJob(job, padding, "sync").check_models()
    fits = compose_padded(*overrides, "critic.model.path=hdfs://models/critic")
    check_job(fits).check_models()


@cache
def plain_job() -> VerlJob:
    return check_job(compose_padded())


def with_engines(pad_length, *configs) -> VerlJob:
    """A reader of a job with these engines, each a strategy and its settings."""
    reader = copy(plain_job())
    reader.padding = replace(reader.padding, pad_length=pad_length)
    rest = {
        "section": "",
        "settings": {},
        "n_gpus": 8,
        "attention": None,
    }
    reader.engines = {
        str(place): RoleEngine(config=config, **rest) for place, config in enumerate(configs)
    }
    return reader


def megatron(tensor=1, context=1, fp8=None):
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
    return SimpleNamespace(strategy="megatron", **sizes, override_transformer_config={"fp8": fp8})


FSDP2 = SimpleNamespace(strategy="fsdp2", ulysses_sequence_parallel_size=8)


@pytest.mark.parametrize(
    ("engine", "multiple"),
    [
        (FSDP2, 1),  # Ulysses rounds the packed micro-batch up, not each row
        (SimpleNamespace(strategy="veomni", ulysses_parallel_size=4), 1),
        (megatron(), 1),
        (megatron(tensor=4), 4),
        (megatron(tensor=2, context=2), 8),
        (megatron(context=4), 8),
        (megatron(fp8="hybrid"), 16),
        (megatron(tensor=3, fp8="e4m3"), 48),
    ],
)
def test_rows_are_rounded_up_as_verls_engines_do(engine, multiple):
    fits = max(2, multiple)
    assert with_engines("auto", engine).pad_length() == fits
    assert with_engines(3 * fits, engine).pad_length() == 3 * fits


def test_a_pad_is_as_long_as_the_hungriest_role_and_its_picture_need():
    reader = with_engines("auto", megatron(tensor=4), megatron(context=3))
    assert (reader.pad_length(), reader.pad_length(at_least=13)) == (12, 24)
    assert with_engines("auto", FSDP2).pad_length(at_least=5) == 5


@pytest.mark.parametrize(("length", "fitting"), [(6, 8), (2, 4), (9, 12)])
def test_a_length_that_an_engine_would_round_up_is_refused(length, fitting):
    message = rf"^padding\.pad_length={length}: .* multiples of 4 .*auto, or {fitting}\.$"
    with pytest.raises(PaddingConfigError, match=message):
        with_engines(length, megatron(tensor=4)).pad_length()
