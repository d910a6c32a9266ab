"""Settings of engines, and models that do not go with them, are refused before a worker starts."""

from contextlib import nullcontext

import pytest

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import check_model

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def check(*overrides):
    return check_job(compose_job(*DYNAMIC, "+padding=prompt", *overrides))


def engines_of(*overrides):
    return list(check(*overrides).engines.values())


def check_megatron(*overrides):
    check("model_engine=megatron", *overrides)


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
    message = r"attn_implementation=.*: .* Ulysses .* to flash_attention_2, or"
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
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=.*{fix}"):
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
