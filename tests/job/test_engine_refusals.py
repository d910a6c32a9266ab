"""Settings of engines, and models that do not go with them, are refused before a worker starts."""

from contextlib import nullcontext

import pytest
import transformers

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import check_model

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
WITH_ALL = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
OF_TRANSFORMER = "megatron.override_transformer_config"
OVERRIDE, RATE = f"+{ACTOR}.{OF_TRANSFORMER}", f"{OF_TRANSFORMER}.moe_router_bias_update_rate"
MTP = ("actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_train=true")


def check(*overrides):
    return check_job(compose_job(*DYNAMIC, "+padding=prompt", *overrides))


def engines_of(*overrides):
    return list(check(*overrides).engines.values())


def check_megatron(*overrides):
    check("model_engine=megatron", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{OVERRIDE}.moe_router_load_balancing_type=[seq_aux_loss,sinkhorn]"],
        [f"{OVERRIDE}.moe_aux_loss_coeff=0.01"],
        [f"{OVERRIDE}.moe_z_loss_coeff=0.001"],
    ],
)
def test_a_router_that_would_learn_from_pads_is_refused(overrides):
    name = overrides[0].partition("=")[0].removeprefix("+")
    with pytest.raises(
        PaddingConfigError, match=rf"^{name}=.*: routers would count .* Leave it out"
    ):
        check_megatron(*overrides)


@pytest.mark.parametrize("section", [ACTOR, REF, CRITIC])
def test_experts_whose_places_pads_would_take_are_refused_in_passes_too(section):
    setting = f"{section}.{OF_TRANSFORMER}.moe_expert_capacity_factor"
    with pytest.raises(
        PaddingConfigError, match=rf"^{setting}=1\.5: routers would count .* Leave it out"
    ):
        check_megatron(
            *([] if section == ACTOR else WITH_ALL), f"+{setting}=1.5"
        )  # a reference has what the actor has


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            f"{OVERRIDE}.moe_router_load_balancing_type=none",
            f"{OVERRIDE}.moe_aux_loss_coeff=0.0",
        ],
        [f"+{REF}.{OF_TRANSFORMER}.moe_router_load_balancing_type=sinkhorn"],
        [f"{OVERRIDE}.calculate_per_token_loss=true"],
        [f"{OVERRIDE}.moe_expert_capacity_factor=-1"],
        MTP[:1],
    ],
)
def test_what_changes_no_gradient_is_not(overrides):
    check_megatron(*WITH_ALL, *overrides)


def test_a_loss_of_several_predicted_tokens_is_refused_with_megatron_alone():
    with pytest.raises(
        PaddingConfigError,
        match=r"^actor_rollout_ref.model.mtp.enable_train=True: .* Set it to False",
    ):
        check_megatron(*MTP)
    check_megatron(*MTP[1:])  # without the layer
    check(*MTP)  # FSDP's engines leave the layer out


def test_buckets_that_ranks_of_a_row_cannot_share_are_refused():
    def check_bucket(bucket, *sizes):
        settings = ("pad_to_length=true", f"pad_to_length_bucket={bucket}", *sizes)
        check_megatron(
            *(f"{section}.megatron.{setting}" for section in (ACTOR, REF) for setting in settings)
        )

    for sizes, multiple in (
        (("context_parallel_size=2",), 4),
        (("tensor_model_parallel_size=2",), 2),
        (("tensor_model_parallel_size=4", "context_parallel_size=2"), 16),
    ):
        check_bucket(3 * multiple, *sizes)
        message = (
            rf"\.megatron\.pad_to_length_bucket={2 * multiple + 1}: .* Set it to {3 * multiple}\.$"
        )
        with pytest.raises(PaddingConfigError, match=message):
            check_bucket(2 * multiple + 1, *sizes)
    check_bucket(3)


def test_a_scheduler_that_follows_no_plan_is_refused():
    setting = f"{ACTOR}.megatron.dynamic_context_parallel"
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=True: .* Set it to False"):
        check_megatron(f"{setting}=true", f"{ACTOR}.megatron.max_seqlen_per_dp_cp_rank=4096")


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def check_with(model, folder, *overrides):
    """Checks a padded job of this actor; a critic, where there is one, has another model."""
    model.save_pretrained(folder / "actor")
    transformers.Qwen2Config(**SMALL).save_pretrained(folder / "critic")
    check(
        f"actor_rollout_ref.model.path={folder / 'actor'}",
        f"critic.model.path={folder / 'critic'}",
        *overrides,
    )


@pytest.mark.parametrize("vanilla", ["true", "false"])
def test_biases_of_experts_that_a_bridge_has_follow_tokens_are_refused(vanilla, tmp_path):
    model = transformers.DeepseekV3Config(**SMALL, n_routed_experts=8, n_group=2, topk_group=1)
    job = ("model_engine=megatron", f"{ACTOR}.megatron.vanilla_mbridge={vanilla}")
    with pytest.raises(
        PaddingConfigError, match=rf"^{ACTOR}\.{RATE}=None: .* type deepseek_v3, .* Set it to 0\.$"
    ):
        check_with(model, tmp_path, *job)
    check_with(model, tmp_path, *job, f"+{ACTOR}.{RATE}=0")
    check_with(
        model, tmp_path, *job, f"+{ACTOR}.{OF_TRANSFORMER}.moe_router_enable_expert_bias=false"
    )
    check_with(model, tmp_path)  # FSDP's engines leave them as they are
    model.n_routed_experts = 0  # of a dense model
    check_with(model, tmp_path, *job)
    has_biases = f"{OVERRIDE}.moe_router_enable_expert_bias=true"
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.{RATE}=None: .* Set it to 0\.$"):
        check_with(model, tmp_path, *job, has_biases)
    check_with(model, tmp_path, *job, has_biases, f"+{ACTOR}.{RATE}=0")


@pytest.mark.parametrize("key", ["attention_chunk_size", "index_topk", "keep_window_size"])
def test_attention_that_depends_on_all_that_is_packed_is_refused(key):
    packed, unpacked = (
        engines_of(f"{MODEL}.use_remove_padding={value}", "padding.packer=plan")
        for value in ("true", "false")
    )
    with pytest.raises(PaddingConfigError, match=rf"^a/model: .*{key}=8192"):
        check_model("a/model", {"text_config": {key: 8192}}, packed)
    check_model("a/model", {"text_config": {key: None}}, packed)
    check_model("a/model", {"text_config": {"attention_chunk_size": 8192}}, unpacked)


MODEL, GAE = "actor_rollout_ref.model", "algorithm.adv_estimator=gae"
MEGATRON, MODE = "model_engine=megatron", "trainer.v1.trainer_mode"
ULYSSES = (f"{ACTOR}.ulysses_sequence_parallel_size=2",)
VEOMNI = ("model_engine=veomni", f"{ACTOR}.veomni.ulysses_parallel_size=2")
ATTENTION = "+actor_rollout_ref.model.override_config.attn_implementation"
OF_VEOMNI = f"{ACTOR}.veomni.attn_implementation"
PATH = f"{MODEL}.lora_adapter_path=/adapter"


@pytest.mark.parametrize(
    "overrides",
    [
        *((*ULYSSES, f"{ATTENTION}={name}") for name in ("null", "{text_config: sdpa}")),
        *((*VEOMNI, f"{OF_VEOMNI}='{name}'") for name in ("sdpa", "kernels-community/flash-attn2")),
        (
            *VEOMNI,
            GAE,
            "critic.veomni.ulysses_parallel_size=2",
            "critic.veomni.attn_implementation=eager",
        ),
    ],
)
def test_an_attention_past_the_exchange_is_refused(overrides):
    message = r"attn_implementation=.*: does not support Ulysses: .* to flash_attention_2, or"
    with pytest.raises(PaddingConfigError, match=message):
        check(*overrides)


def test_what_exchanges_or_shares_no_row_is_not_refused():
    check(*VEOMNI)
    check(VEOMNI[0], f"{OF_VEOMNI}=eager")
    check(*ULYSSES, f"{ATTENTION}=sdpa")


@pytest.mark.parametrize(
    ("overrides", "setting", "rank"),
    [
        ((MEGATRON, f"{MODEL}.lora_rank=8"), f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"),
        (
            (MEGATRON, f"{MODEL}.lora.rank=8", PATH),
            f"{MODEL}.lora_adapter_path",
            f"{MODEL}.lora.rank and {MODEL}.lora.adapter_path",
        ),
        ((VEOMNI[0], f"{MODEL}.lora_rank=8"), f"{MODEL}.lora_rank", None),
        ((PATH,), f"{MODEL}.lora_adapter_path", f"{MODEL}.lora_rank"),
        ((f"{MODEL}.lora.rank=8",), f"{MODEL}.lora.rank", f"{MODEL}.lora_rank"),
    ],
)
def test_an_adapter_that_the_engine_does_not_make_is_refused(overrides, setting, rank):
    fix = rf"Set \S*{rank}\b" if rank else r"Leave it out\.$"
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=.* makes no adapter .*{fix}"):
        check(*overrides)


def test_a_rank_of_none_is_no_adapter():
    check(MEGATRON, f"{MODEL}.lora_rank=-1")
    check(f"{MODEL}.lora.rank=-1", f"{MODEL}.lora_rank=8", PATH)


@pytest.mark.parametrize(
    ("overrides", "reaches"),
    [
        ((f"{MODEL}.lora_rank=8", f"{MODE}=colocate_async"), True),
        ((f"{MODEL}.lora_rank=8", f"{MODE}=separate_async"), False),
        ((MEGATRON, f"{MODEL}.lora.rank=8", f"{MODE}=separate_async"), False),
        (("+local=cpu", f"{MODEL}.lora_rank=8", f"{MODEL}.lora_adapter_path=/adapter"), False),
    ],
)
def test_an_adapter_that_would_not_reach_the_rollout_is_refused(overrides, reaches):
    with (
        nullcontext()
        if reaches
        else pytest.raises(PaddingConfigError, match=rf"^{MODEL}\.lora\.merge=False: ")
    ):
        check(*overrides)
    check(*overrides, f"{MODEL}.lora.merge=true")
