"""What is read from a verl config, and which jobs are refused before any worker starts."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import verl
from verl.trainer.ppo import v1
from verl.trainer.ppo.v1 import get_trainer_cls

from tests.support.drawn_jobs import forest_of_chains
from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.config import PaddingConfig
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.job.model_config import kinds_of_layers
from verl_padding.job.verl_job import MIN_BRANCH_TOKENS, VerlJob
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.plan import Pass, Rows, TransformerCost, plan_batch
from verl_padding.plan.planner import reuses_layout_of

A, R, REF_ = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, GAE, KL = "actor_rollout_ref.model", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true"
MEGATRON, MODE, PLAN = "model_engine=megatron", "trainer.v1.trainer_mode", "padding.packer=plan"
SHARING = (PLAN, "padding.sharing=on")
FIXED = (
    f"{A}.use_dynamic_bsz=false",
    f"{R}.log_prob_use_dynamic_bsz=false",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    f"{REF_}.log_prob_micro_batch_size_per_gpu=16",
)


def padded(*overrides):
    return compose_job("+padding=prompt", *DYNAMIC, *overrides)


def job_of(*overrides, updates_actor=True):
    return check_job(padded(*overrides)).step_job(updates_actor=updates_actor)


@pytest.mark.parametrize(
    ("warm_up", "steps_of_98_rows"), [(10, {CRITIC: 27}), (0, {CRITIC: 27, ACTOR: 18})]
)
def test_lcm_takes_verls_steps_also_while_the_critic_warms_up(warm_up, steps_of_98_rows):
    config = compose_job(
        "+padding=lcm",
        *DYNAMIC,
        GAE,
        "data.train_batch_size=24",
        f"{R}.n=2",
        f"{A}.ppo_mini_batch_size=3",
        "critic.ppo_mini_batch_size=2",
        f"trainer.critic_warmup={warm_up}",
    )
    sizes = {ACTOR: 6, LOG_PROB: 6, CRITIC: 2, VALUES: 2}
    reader = VerlJob(config, PaddingConfig.from_section(config.padding), "sync")
    job = reader.step_job(dp_sizes=sizes, updates_actor=not warm_up, seed=0)
    trainer = SimpleNamespace(config=config, use_critic=True, global_steps=1)
    multiple = get_trainer_cls("sync")._get_required_batch_multiple(trainer, sizes[ACTOR])
    for n_rows in (98, 24, 97, 144):
        rows = Rows.from_keys([f"{row}_0_0" for row in range(n_rows)], [8] * n_rows)
        layouts = plan_batch(rows, job).layouts
        padded = -(-n_rows // multiple) * multiple
        steps = {name: padded // job.mini_batch_rows(job.updates[name]) for name in job.updates}
        assert {name: layouts[name].n_mini_batches for name in job.updates} == steps
        if n_rows == 98:
            assert steps == steps_of_98_rows


def test_settings_of_a_padded_trainers_own_name_are_refused():
    overrides = [
        "trainer.v1.trainer_mode=padded_separate_async",
        "+trainer.v1.padded_separate_async.rows=4",
    ]
    with pytest.raises(
        PaddingConfigError,
        match=r"padded_separate_async: verl does not read .*separate_async instead",
    ):
        job_of(*overrides)


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


def test_fixed_micro_batches_become_multiples_of_a_cell():
    job = job_of(*FIXED, KL)
    assert (job.updates[ACTOR].cell_multiple, job.updates[ACTOR].token_budget) == (4, None)
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


def test_a_critic_adds_an_update_and_a_pass_with_its_engines_budget():
    job = job_of(
        GAE,
        "critic.ppo_mini_batch_size=128",
        "critic.ulysses_sequence_parallel_size=4",  # verl hands it to no engine
    )
    assert job.updates[CRITIC].prompts_per_mini_batch == 128
    assert (job.updates[CRITIC].dp_size, job.updates[CRITIC].token_budget) == (8, 32768)
    assert job.inference[VALUES].token_budget == 32768
    job = job_of(GAE, "critic.fsdp.ulysses_sequence_parallel_size=4")
    assert (job.updates[CRITIC].dp_size, job.updates[CRITIC].token_budget) == (2, 4 * 32768)
    assert job.inference[VALUES].token_budget == 4 * 32768


def test_bypass_mode_runs_no_log_prob_pass_but_for_an_own_reference():
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    assert list(job_of(bypass).inference) == []
    lora = (bypass, KL, f"{MODEL}.lora_rank=8")
    assert list(job_of(*lora).inference) == [LOG_PROB]


SMALL_LCM = ["padding.strategy=lcm", f"{A}.ppo_mini_batch_size=2", "data.train_batch_size=16"]
FIXED_REF = [
    KL,
    f"{REF_}.log_prob_use_dynamic_bsz=false",
    f"{REF_}.log_prob_micro_batch_size_per_gpu=2",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=100", f"{A}.ppo_mini_batch_size=30"],
            rf"{A}.ppo_mini_batch_size=30 of 'actor' does not divide data.train_batch_size=100: ",
        ),
        (
            [f"{A}.strategy=megatron"],
            rf"{A}.strategy=megatron: the section's engine is a FSDPEngineConfig\. ",
        ),
        ([MEGATRON, f"{A}.strategy=fsdp2"], rf"{A}.strategy=fsdp2: .* is a McoreEngineConfig\. "),
        (["trainer.use_v1=false"], r"trainer.use_v1=False: .*trainer.use_v1=True"),
        (
            ["+async_training={}"],
            r"trainer.use_v1=True: .* fully asynchronous one \(async_training\)",
        ),
        (
            ["trainer.v1.trainer_mode=async"],
            r"trainer.v1.trainer_mode='async': .* Choices: sync, colocate_async,",
        ),
        (
            [GAE, "+critic.fsdp.use_dynamic_bsz=false"],
            r"\+critic.fsdp.micro_batch_size_per_gpu=None: .*_bsz=False",
        ),
        (
            [f"{A}.loss_agg_mode=seq-mean-token-sum-norm"],
            rf"{A}.loss_scale_factor=None: .*Set it to a constant",
        ),
        (
            [f"{A}.ppo_max_token_len_per_gpu=null"],
            rf"{A}.ppo_max_token_len_per_gpu=None: micro-batches are cut",
        ),
        (SMALL_LCM, r"padding.strategy='lcm'.* = 2 rows, not a multiple of 8 data-parallel ranks"),
        (
            ["padding.sharing=on"],
            r"padding.sharing='on' with padding.packer='verl': only the plan keeps ",
        ),
        ([*SHARING, MEGATRON], rf"padding.sharing='on': .* {A} has strategy=megatron"),
        (
            [*SHARING, f"{MODEL}.use_remove_padding=false"],
            rf"padding.sharing=.* {A} has .*use_remove_padding=False",
        ),
        ([*SHARING, *FIXED_REF], rf"padding.sharing='on': .* {REF_} has .*dynamic sizes=False"),
        (
            ["padding.pad_length=9", f"{A}.ppo_max_token_len_per_gpu=8"],
            r"padding.pad_length=9: a pad does not fit",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_setting_value_and_fix(overrides, message):
    with pytest.raises(PaddingConfigError, match=f"^{message}"):
        job_of(*overrides)


@pytest.mark.parametrize("synchronous", [True, False])
def test_whole_parameters_on_each_rank_keep_reuse_and_sharing(synchronous):
    actor = f"{A}.fsdp_config"
    job = job_of(
        PLAN,
        "padding.sharing=on",
        f"{actor}.fsdp_size=1",
        f"{actor}.use_no_sync_for_gradient_accumulation={not synchronous}",
    )
    assert job.inference[LOG_PROB].sync_point == "mini_batch"
    assert reuses_layout_of(job, job.inference[LOG_PROB]) == ACTOR
    keys = [f"p{prompt}_0_{turn}" for prompt in range(32) for turn in range(3)]
    tokens = [100, 200, 300] * 32
    plan = plan_batch(
        Rows.from_keys(keys, tokens, forest_of_chains(tokens, [row // 3 for row in range(96)])), job
    )
    assert {name: figures.sharing_factor for name, figures in plan.figures.items()} == {
        ACTOR: 2,
        LOG_PROB: 2,
    }


def test_the_plans_micro_batches_are_refused_with_another_verl(monkeypatch):
    monkeypatch.setattr("verl.__version__", "0.10.0")
    with pytest.raises(PaddingConfigError, match=r"this is verl 0.10.0. Set padding.packer=verl"):
        job_of(PLAN)
    assert job_of().packer == "verl"


def test_the_cost_of_a_row_is_that_of_its_roles_model(tmp_path):
    actor, critic = make_tiny_model("qwen2", tmp_path), make_tiny_model("qwen3_moe", tmp_path)
    job = job_of(
        "padding.cost_model=model",
        GAE,
        f"actor_rollout_ref.model.path={actor}",
        f"critic.model.path={critic}",
    )
    of_actor = TransformerCost.from_config(json.loads((actor / "config.json").read_text()))
    assert job.cost_model_of(job.updates[ACTOR]) == of_actor
    assert job.cost_model_of(job.inference[LOG_PROB]) == of_actor
    of_critic = TransformerCost.from_config(
        json.loads((critic / "config.json").read_text()), lm_head=False
    )
    assert job.cost_model_of(job.updates[CRITIC]) == of_critic != of_actor


def test_a_model_whose_cost_cannot_be_known_is_refused_with_its_path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for path, message in (
        (
            tmp_path / "nothing",
            rf"the config of actor_rollout_ref.model.path={tmp_path}/nothing cannot be read",
        ),
        (
            tmp_path,
            (
                rf"hidden_size is missing.*\(actor_rollout_ref.model.path={tmp_path}\)."
                r" .*cost_model=attention"
            ),
        ),
    ):
        with pytest.raises(PaddingConfigError, match=rf"^padding.cost_model='model': .*{message}"):
            job_of("padding.cost_model=model", f"actor_rollout_ref.model.path={path}")


CORRECTION, OF_LOSS = "algorithm.rollout_correction", f"{A}.policy_loss.rollout_correction"
BYPASS = (f"{CORRECTION}.bypass_mode=true",)
BYPASS_LOSS = (*BYPASS, f"{A}.policy_loss.loss_mode=bypass_mode")


@pytest.mark.parametrize(
    "given", ["loss_type=reinforce", "rollout_is=token", "rollout_rs=token_k1"]
)
def test_a_correction_that_no_loss_reads_is_refused(given):
    message = (
        rf"^{CORRECTION}.{given}: .*Set .*loss_mode=bypass_mode and \+{OF_LOSS}.{given}, or leave"
        r" it out\.$"
    )
    of_tokens = given == "rollout_is=token"
    beside = f"+{OF_LOSS}.{'rollout_rs_threshold=0.5_2' if of_tokens else 'rollout_is=sequence'}"
    for lost in (BYPASS, BYPASS_LOSS, (*BYPASS_LOSS, beside)):
        with pytest.raises(PaddingConfigError, match=message):
            job_of(*lost, f"{CORRECTION}.{given}")
    job_of(f"{CORRECTION}.{given}")  # which verl's trainer does, or leaves as it is
    job_of(*BYPASS_LOSS, f"{CORRECTION}.{given}", f"+{OF_LOSS}.{given}")
    job_of(*BYPASS_LOSS, f"+{OF_LOSS}.{given}")
    job_of(*BYPASS)


def test_verl_still_hands_no_loss_the_correction_of_a_bypass():
    # If this fails, verl's v1 trainer completes the loss's section, and the refusal of such
    # corrections can go.
    files = (Path(v1.__file__).parent.glob("*.py"), Path(verl.__file__).parent.glob("workers/*.py"))
    assert not [path for path in chain(*files) if "apply_bypass_mode" in path.read_text()]


def test_the_experts_of_a_mixture_are_counted_from_its_config(tmp_path):
    for config, experts in (
        (transformers.Qwen3MoeConfig(num_experts=6), 6),
        (transformers.Qwen2Config(), None),
    ):
        config.save_pretrained(tmp_path)
        assert check_job(padded(f"{MODEL}.path={tmp_path}")).n_experts == experts


SHARED = ("padding.packer=plan", "padding.sharing=on")
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_a_model_whose_rows_cannot_part_shares_whole_rows_said_once(tmp_path, caplog):
    for config, branches in (
        (transformers.Qwen2Config(), True),
        (transformers.Qwen3NextConfig(**HYBRID), True),
        (transformers.Qwen3_5TextConfig(**HYBRID), True),
        (transformers.Qwen3_5Config(text_config=HYBRID), True),
        (transformers.OlmoHybridConfig(**HYBRID), False),
        (transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv"] * 2), False),
    ):
        caplog.clear()
        config.save_pretrained(tmp_path)
        reader = check_job(padded(f"{MODEL}.path={tmp_path}", *SHARED))
        assert reader.may_branch == branches
        keeps_states = "linear_attention" in kinds_of_layers(config.to_dict()) and branches
        pieces = reader.step_job().updates["actor"].min_branch_tokens
        assert pieces == (MIN_BRANCH_TOKENS if keeps_states else 0)
        kind = config.get_text_config().model_type
        assert caplog.text.count(f"model_type={kind}") == (not branches)
    shared = (*SHARED, f"{MODEL}.path={make_tiny_model('qwen2', tmp_path / 'actor')}")
    assert check_job(padded(*shared, GAE, f"critic.model.path={tmp_path}")).may_branch is False


ULYSSES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    f"+{MODEL}.override_config.attn_implementation=flash_attention_2",
)


def test_linear_attention_over_ulysses_ranks_is_verls_or_refused(tmp_path):
    transformers.Qwen3_5Config(text_config=HYBRID).save_pretrained(tmp_path)
    assert not check_job(padded(f"{MODEL}.path={tmp_path}", *SHARED, *ULYSSES)).may_branch
    for config in (
        transformers.Qwen3NextConfig(**HYBRID),
        transformers.Qwen3_5TextConfig(**HYBRID),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(PaddingConfigError, match=f"{config.model_type} does not support Ulys"):
            check_job(padded(f"{MODEL}.path={tmp_path}", *ULYSSES))


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
            r"critic.model.path=.* turns positions.*rope_type='dynamic'",
        ),
        (
            "hdfs://models/nothing",
            (),
            r"^the config of critic.model.path=hdfs://models/nothing cannot be read",
        ),
    ):
        job = padded(*overrides, f"critic.model.path={path}", *settings)
        padding = check_job(job).padding
        with pytest.raises(PaddingConfigError, match=message):
            VerlJob(job, padding).check_models()
    fits = padded(*overrides, "critic.model.path=hdfs://models/critic")
    check_job(fits).check_models()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_local_updates_beside_a_sleeping_rollout_are_refused(mode):
    setting = f"trainer.v1.{mode}.parameter_sync_step"
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=2: "):
        job_of(f"trainer.v1.trainer_mode={mode}", f"++{setting}=2")
