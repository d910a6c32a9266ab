"""What Megatron would learn from pads, or cannot run, is refused before a worker starts."""

import pytest

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.job_reader import check_job

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
MEGATRON = (*DYNAMIC, "model_engine=megatron", "+padding=prompt")
WITH_ALL = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
OVERRIDE = f"+{ACTOR}.megatron.override_transformer_config"
SCHEDULER = tuple(
    f"{section}.megatron.{setting}"
    for section in (ACTOR, REF)
    for setting in ("dynamic_context_parallel=true", "max_seqlen_per_dp_cp_rank=4096")
)
MTP = ("actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_train=true")


def check(*overrides):
    check_job(compose_job(*MEGATRON, *overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss"],
        [f"{OVERRIDE}.moe_router_load_balancing_type=[seq_aux_loss,sinkhorn]"],
        [f"{OVERRIDE}.moe_router_load_balancing_type=global_aux_loss", f"{OVERRIDE}.moe_aux_loss_coeff=0.01"],
        [f"{OVERRIDE}.moe_aux_loss_coeff=0.01"],
        [f"{OVERRIDE}.moe_aux_loss_coeff=[0,0.01]"],
        [f"{OVERRIDE}.moe_z_loss_coeff=0.001"],
        [f"{OVERRIDE}.moe_router_enable_expert_bias=true"],
        [f"{OVERRIDE}.moe_router_bias_update_rate=0.001"],
    ],
)
def test_a_router_that_would_learn_from_pads_is_refused(overrides):
    name = overrides[0].partition("=")[0].removeprefix("+")
    with pytest.raises(PaddingConfigError, match=rf"^{name}=.*: routers would count .* Leave it out"):
        check(*overrides)


@pytest.mark.parametrize("section", [ACTOR, REF, CRITIC])
def test_experts_whose_places_pads_would_take_are_refused_in_passes_too(section):
    setting = f"{section}.megatron.override_transformer_config.moe_expert_capacity_factor"
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=1\.5: routers would count .* Leave it out"):
        check(*([] if section == ACTOR else WITH_ALL), f"+{setting}=1.5")  # a reference has what the actor has


@pytest.mark.parametrize("section", [ACTOR, CRITIC])
def test_routes_that_depend_on_the_other_tokens_of_a_micro_batch_are_refused(section):
    setting = f"{section}.megatron.override_transformer_config.moe_router_load_balancing_type"
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=sinkhorn: .* Leave it out"):
        check(*WITH_ALL, f"+{setting}=sinkhorn")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{OVERRIDE}.moe_router_load_balancing_type=none", f"{OVERRIDE}.moe_aux_loss_coeff=0.01"],
        [f"{OVERRIDE}.moe_router_load_balancing_type=[aux_loss]", f"{OVERRIDE}.moe_aux_loss_coeff=[0]"],
        [f"{OVERRIDE}.moe_expert_capacity_factor=-1"],
        [f"+{REF}.megatron.override_transformer_config.moe_router_load_balancing_type=sinkhorn"],
        [f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss", f"{OVERRIDE}.moe_aux_loss_coeff=0"],
        [f"{OVERRIDE}.moe_z_loss_coeff=null"],
        [f"{OVERRIDE}.moe_router_enable_expert_bias=true", f"{OVERRIDE}.moe_router_bias_update_rate=0"],
        [f"{OVERRIDE}.moe_router_enable_expert_bias=false", f"{OVERRIDE}.moe_router_bias_update_rate=0.1"],
        [f"+{REF}.megatron.override_transformer_config.moe_z_loss_coeff=0.001"],
        [f"{OVERRIDE}.calculate_per_token_loss=true"],
        MTP[:1],
    ],
)
def test_what_changes_no_gradient_is_not(overrides):
    check(*WITH_ALL, *overrides)


def test_a_loss_of_several_predicted_tokens_is_refused_with_megatron_alone():
    with pytest.raises(PaddingConfigError, match=r"^actor_rollout_ref.model.mtp.enable_train=True: .* Set it to False"):
        check(*MTP)
    check(*MTP[1:])  # without the layer
    check_job(compose_job(*DYNAMIC, "+padding=prompt", *MTP))  # FSDP's engines leave the layer out


def test_buckets_that_ranks_of_a_row_cannot_share_are_refused():
    def check_bucket(bucket, *sizes):
        settings = ("pad_to_length=true", f"pad_to_length_bucket={bucket}", *sizes)
        check(*(f"{section}.megatron.{setting}" for section in (ACTOR, REF) for setting in settings))

    for sizes, multiple in (
        (("context_parallel_size=2",), 4),
        (("tensor_model_parallel_size=2",), 2),
        (("tensor_model_parallel_size=2", "context_parallel_size=2"), 4),
        (("tensor_model_parallel_size=4", "context_parallel_size=2"), 8),
        (("tensor_model_parallel_size=2", "vanilla_mbridge=true", "sequence_parallel=false"), 2),
    ):
        check_bucket(3 * multiple, *sizes)
        message = rf"\.megatron\.pad_to_length_bucket={2 * multiple + 1}: .* Set it to {3 * multiple}\.$"
        with pytest.raises(PaddingConfigError, match=message):
            check_bucket(2 * multiple + 1, *sizes)
    check_bucket(3)
    check_bucket(3, "tensor_model_parallel_size=2", "sequence_parallel=false")


@pytest.mark.parametrize("override", ["padding.timing=true", "padding.packer=plan", "padding.cost_model=measured"])
def test_a_scheduler_neither_follows_a_plan_nor_is_timed(override):
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.megatron\.dynamic_context_parallel=True: .* Set it to"):
        check(*SCHEDULER, override)
