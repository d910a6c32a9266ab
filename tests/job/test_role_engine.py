"""Roles and their engines are, on the driver, those that verl's own code says and makes."""

import warnings
from copy import deepcopy
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.support.verl_config import compose_job
from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import check_engines
from verl_padding.job.role_engine import has_critic, has_reference, role_engines
from verl_padding.job.savings import Savings

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
MEGATRON, VEOMNI = "model_engine=megatron", "model_engine=veomni"
DYNAMIC = (
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.use_kl_loss=true",
    "algorithm.adv_estimator=gae",
)
ROLE, FSDP = "ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"


def of_both(strategy, *settings):
    """Settings of the engines of actor and critic."""
    return (
        f"model_engine={strategy}",
        *(f"{role}.{strategy}.{each}" for role in (ACTOR, CRITIC) for each in settings),
    )


JOBS = {
    "fsdp": (),
    "the role's Ulysses size alone": (f"{ACTOR}.{ROLE}=2", f"{CRITIC}.{ROLE}=4"),
    "both": (
        f"{ACTOR}.{ROLE}=2",
        f"{ACTOR}.{FSDP}=4",
        f"{CRITIC}.{ROLE}=2",
        f"{CRITIC}.fsdp.{ROLE}=4",
    ),
    "budgets": (
        f"{ACTOR}.strategy=fsdp2",
        f"{CRITIC}.strategy=fsdp2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2000",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=3000",
        "+critic.ppo_infer_max_token_len_per_gpu=4000",
        "critic.ppo_max_token_len_per_gpu=5000",
        "actor_rollout_ref.model.use_remove_padding=false",
    ),
    "fixed rows": (
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=5",
        "+critic.fsdp.use_dynamic_bsz=false",
        "+critic.fsdp.micro_batch_size_per_gpu=6",
        "+critic.fsdp.infer_micro_batch_size_per_gpu=7",
    ),
    "megatron": of_both("megatron", "tensor_model_parallel_size=2", "context_parallel_size=2"),
    "veomni": (*of_both("veomni", "ulysses_parallel_size=2"), f"{ACTOR}.pad_to_length=true"),
}


class EnoughError(Exception):
    """Enough was seen of verl's code."""


def engine_in_verls_worker(config, role):
    """The config that verl's worker makes a training worker of, for actor or reference."""
    made = []

    class Recorder:
        def __init__(self, config):
            made.append(config)
            raise EnoughError

    class Worker(ActorRolloutRefWorker):
        actor_worker_cls = ref_worker_cls = Recorder

        def __init__(self):
            self.config, self.role = deepcopy(config.actor_rollout_ref), role
            self.distillation_enabled, self._omega_profiler_config = False, {}

    with pytest.raises(EnoughError):
        Worker().init_model()
    return made[0]


def engine_in_verls_trainer(config, monkeypatch):
    """The config that verl's trainer hands the critic's workers."""
    made = []

    def record(cls, config, **_):
        if isinstance(config, TrainingWorkerConfig):
            made.append(config)
            raise EnoughError

    class Trainer(trainer_base.PPOTrainer):
        def __init__(self):
            self.config, self.use_critic, self.use_reference_policy = deepcopy(config), True, True

        def _init_tokenizer(self):
            pass

        _init_dataloader = _init_dump_executor = on_step_end = on_sample_end = _init_tokenizer

        def _init_resource_pool_mgr(self):
            super()._init_resource_pool_mgr()
            self.resource_pool_manager = SimpleNamespace(
                create_resource_pool=lambda: None,
                resource_pool_dict={"global_pool": "global_pool"},
                get_resource_pool=lambda role: "global_pool",
            )

    monkeypatch.setattr(trainer_base, "RayClassWithInitArgs", record)
    with pytest.raises(EnoughError):
        Trainer()._setup()
    return made[0]


@pytest.mark.parametrize("overrides", JOBS.values(), ids=JOBS)
def test_engines_are_those_that_verls_own_code_makes(overrides, tiny_model, monkeypatch):
    config = compose_job(
        *DYNAMIC,
        f"actor_rollout_ref.model.path={tiny_model}",
        f"critic.model.path={tiny_model}",
        *overrides,
    )
    engines = role_engines(config)
    assert list(engines) == ["critic", "ref", "actor"]
    for role, engine in engines.items():
        made = engine_in_verls_trainer(config, monkeypatch) if role == "critic" else None
        theirs = made or engine_in_verls_worker(config, role)
        # What verl's TrainingWorker does first.
        theirs.engine_config.use_remove_padding = theirs.model_config.get(
            "use_remove_padding", False
        )
        assert engine.config == theirs.engine_config


def engines_of(*overrides, packer="verl"):
    engines = role_engines(compose_job(*DYNAMIC, *overrides))
    check_engines(list(engines.values()), Savings(PaddingConfig(packer=packer)))
    return engines


def engine_of(role, *overrides):
    return engines_of(*overrides)[role]


NO_SYNC = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"


@pytest.mark.parametrize(
    ("overrides", "training", "inference"),
    [
        ((), "micro_batch", "micro_batch"),
        ((f"{ACTOR}.fsdp_config.fsdp_size=1",), "micro_batch", "mini_batch"),
        ((f"{ACTOR}.fsdp_config.fsdp_size=1", NO_SYNC), "mini_batch", "mini_batch"),
        ((MEGATRON,), "mini_batch", "mini_batch"),
        (of_both("megatron", "expert_model_parallel_size=2"), "micro_batch", "micro_batch"),
        ((MEGATRON, f"{ACTOR}.megatron.use_megatron_fsdp=true"), "micro_batch", "micro_batch"),
        ((VEOMNI,), "micro_batch", "micro_batch"),
    ],
)
def test_ranks_synchronize_where_the_engine_has_them_wait(overrides, training, inference):
    engine = engine_of("actor", *overrides)
    assert engine.pass_fields(8, training=True)["sync_point"] == training
    assert engine.pass_fields(8, training=False)["sync_point"] == inference


NOT_PACKED = (
    "actor_rollout_ref.model.use_remove_padding=false",
    "critic.model.use_remove_padding=false",
)


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ((), "row", "row"),
        (NOT_PACKED, "micro_batch", "micro_batch"),
        ((VEOMNI, *NOT_PACKED), "micro_batch", "micro_batch"),
        ((MEGATRON, *NOT_PACKED), "local_batch", "local_batch"),
        (
            (MEGATRON, *NOT_PACKED, f"{ACTOR}.megatron.pad_bshd_to_minibatch_max=false"),
            "micro_batch",
            "local_batch",
        ),
        # verl's engine turns Megatron's fused forward off where rows are not packed.
        (
            (MEGATRON, *NOT_PACKED, "actor_rollout_ref.model.use_fused_kernels=true"),
            "local_batch",
            "local_batch",
        ),
    ],
)
def test_rows_are_padded_to_what_the_engine_pads_them_to(overrides, actor, critic):
    engines = engines_of(*overrides, packer="plan")
    assert engines["actor"].pass_fields(8, training=True)["padded_to"] == actor
    assert engines["critic"].pass_fields(8, training=True)["padded_to"] == critic


@pytest.mark.parametrize(("override", "multiple"), [("null", 4), ("2", 2)])
def test_an_interleaved_schedule_takes_megatrons_groups_of_micro_batches(override, multiple):
    sizes = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    overrides = [
        f"{role}.megatron.{name}={size}" for role in (ACTOR, CRITIC) for name, size in sizes.items()
    ]
    of_model = f"{ACTOR}.megatron.override_transformer_config"
    group = f"+{of_model}.microbatch_group_size_per_vp_stage={override}"
    fields = engine_of("actor", MEGATRON, *overrides, group).pass_fields(2, training=True)
    assert (fields["micro_batch_multiple"], fields["has_pipeline"]) == (multiple, True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            NOT_PACKED[:1],
            r"actor_rollout_ref.model.use_remove_padding=False: .*padding.packer=plan",
        ),
        (
            (MEGATRON, f"+{ACTOR}.optim.min_lr_ratio=0.1"),
            (
                rf"{ACTOR}: verl refuses this section \(.*McoreOptimizerConfig.*min_lr_ratio.*\)\."
                r" Correct it\.$"
            ),
        ),
    ],
)
def test_engines_that_cannot_be_planned_for_are_refused(overrides, message):
    with pytest.raises(PaddingConfigError, match=f"^{message}"):
        engines_of(*overrides)


def test_the_multiple_is_the_one_that_verl_computes():
    # The rule is that of functions which need Megatron to be imported: this says when they have
    # changed.
    source = (Path(verl.__file__).parent / "models" / "mcore" / "util.py").read_text()
    assert "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size" in source
    assert "return math.lcm(16, align_size), align_size * 128" in source


def test_a_critic_and_a_reference_are_where_verl_needs_them():
    config = compose_job(*DYNAMIC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, that there is no critic
        for estimator, enable in product(map(str, ADV_ESTIMATOR_REGISTRY), (None, True, False)):
            config.algorithm.adv_estimator, config.critic.enable = estimator, enable
            assert has_critic(config) == need_critic(config)
    for in_reward, in_loss in product([True, False], repeat=2):
        config.algorithm.use_kl_in_reward, config.actor_rollout_ref.actor.use_kl_loss = (
            in_reward,
            in_loss,
        )
        assert has_reference(config) == need_reference_policy(config)
