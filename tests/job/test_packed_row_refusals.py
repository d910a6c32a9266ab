"""Models that do not keep packed rows apart are refused, and no others; what leaks is measured on some of them."""

from functools import cache

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job import packed_row_refusals
from verl_padding.job.job_reader import check_job
from verl_padding.job.model_refusals import refuse_model
from verl_padding.job.packed_row_refusals import (
    FLASH_ATTENTION_NOT_TOLD,
    MASKS_NOT_TOLD,
    NOT_TOLD,
    TOLD_BY_VEOMNI,
    layers_that_run_on,
)
from verl_padding.job.role_engine import actor_engine, critic_engine

MODEL = "actor_rollout_ref.model"
PACKED = "verl packs rows one behind the other, and"
FSDP, FSDP2 = ("actor_rollout_ref.actor.strategy=fsdp",), ("actor_rollout_ref.actor.strategy=fsdp2",)
VEOMNI, CPU = ("model_engine=veomni",), ("+local=cpu",)
EAGER = (f"++{MODEL}.override_config.attn_implementation=eager",)
SDPA = (f"++{MODEL}.override_config.attn_implementation=sdpa",)
BY_TWO = ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",)
APART = (f"{MODEL}.use_remove_padding=false",)

EXACT = [
    "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2",
    "deepseek_v3", "diffllama", "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granitemoe",
    "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2",
    "jetmoe", "laguna", "llama", "longcat_flash", "mellum", "minimax_m2", "ministral", "mistral", "mixtral", "mllama",
    "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phi4_multimodal",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "youtu",
]  # fmt: skip
"""Types of models whose outputs of a row were the same alone and behind another row, by sdpa, eager and a stand-in for
flash attention that computes as it does (transformers 5.10.4); some of them are compared below."""
RUN_ON = [
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "deepseek_v4",
]  # fmt: skip
"""Types whose are not, by layers that are no attention."""
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = SMALL | {"intermediate_size": 64, "vocab_size": 64, "head_dim": 8, "initializer_range": 0.1}


@cache
def engine_of(*overrides, role=actor_engine):
    return role(compose_job(*DYNAMIC, *overrides))


def refuse(kind, *overrides, role=actor_engine, padding=None, **changes):
    """Refuses a model by its type's own config, with some changes."""
    model = CONFIG_MAPPING[kind]().to_dict() | changes
    section = "critic" if role is critic_engine else "actor_rollout_ref"
    refuse_model(section, "a/model", model, [engine_of(*overrides, role=role)], padding or PaddingConfig())


@pytest.mark.parametrize("engine", [FSDP, FSDP2, CPU], ids=["FSDP", "FSDP2", "CPU"])
@pytest.mark.parametrize("kind", RUN_ON)
def test_layers_that_run_on_from_row_to_row_are_refused(kind, engine):
    with pytest.raises(PaddingConfigError, match=rf"^{MODEL}\.path=a/model: {PACKED} layers of this model \(.+\) run"):
        refuse(kind, *engine)
    refuse(kind, *engine, *APART, padding=PaddingConfig(packer="plan"))


@pytest.mark.parametrize("attention", [(), SDPA, EAGER], ids=["flash attention", "sdpa", "eager"])
@pytest.mark.parametrize("kind", EXACT)
def test_models_that_keep_packed_rows_apart_are_not(kind, attention):
    refuse(kind, *attention)


def test_layers_are_found_by_their_kinds_or_by_their_settings():
    for model, told in (
        ({"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ({"layer_types": ["full_attention"], "conv_L_cache": 3}, ""),
        ({"layer_types": ["attention"], "mamba_d_state": 8}, ""),
        ({"layers_block_type": ["mamba", "hybrid"]}, "mamba, hybrid"),
        ({"block_types": ["recurrent", "attention"]}, "recurrent"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config="),
        ({"model_type": "rwkv7"}, "model_type=rwkv7"),
        ({"layer_types": ["sliding_attention", "chunked_attention"], "kv_lora_rank": 8}, ""),
    ):
        found = layers_that_run_on(model)
        assert found.startswith(told), model
        assert bool(found) == bool(told), model


def test_the_message_names_all_that_keeps_rows_apart():
    with pytest.raises(PaddingConfigError, match=rf"set {MODEL}\.use_remove_padding=False and padding\.packer=plan\.$"):
        refuse("qwen3_next")
    with pytest.raises(PaddingConfigError, match=r"packer=plan and ulysses_sequence_parallel_size=1\.$"):
        refuse("qwen3_next", *BY_TWO)
    sharing = PaddingConfig(packer="plan", sharing="chains")
    with pytest.raises(PaddingConfigError, match=r"use_remove_padding=False and padding\.sharing=off\.$"):
        refuse("qwen3_next", padding=sharing)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_models_that_verl_tells_lengths_of_rows_need_the_kernel_that_follows_them(kind, monkeypatch):
    refused = rf"^{MODEL}\.path=a/model: {PACKED} layers of this model \(linear_attention\) run on"
    for found in (None, object()):
        monkeypatch.setattr(packed_row_refusals, "find_spec", lambda _name, found=found: found)
        with pytest.raises(PaddingConfigError, match=refused):
            refuse(kind, *CPU)  # transformers takes the kernel on a GPU only
        with pytest.raises(PaddingConfigError, match=refused.replace("actor_rollout_ref", "critic")):
            refuse(kind, role=critic_engine)  # verl tells no lengths to a model with a head for values
        refuse(kind, *VEOMNI)
        if found is None:
            with pytest.raises(PaddingConfigError, match=rf"{refused}.* model, or install flash-linear-attention, or"):
                refuse(kind)
    refuse(kind)


@pytest.mark.parametrize("kind", MASKS_NOT_TOLD)
def test_masks_that_are_made_without_position_ids_are_refused(kind):
    refuse(kind)
    for attention, told in ((EAGER, "eager"), (SDPA, "sdpa")):
        with pytest.raises(
            PaddingConfigError,
            match=rf"^{MODEL}\.override_config\.attn_implementation={told}: {PACKED} a model of type {kind} .*"
            r"attn_implementation=flash_attention_2, or",
        ):
            refuse(kind, *attention)
    with pytest.raises(PaddingConfigError, match=rf"=sdpa: {PACKED} .* Set {MODEL}\.use_remove_padding=False and"):
        refuse(kind, *CPU)


@pytest.mark.parametrize("kind", FLASH_ATTENTION_NOT_TOLD)
def test_flash_attention_that_gets_no_position_ids_is_refused(kind):
    refuse(kind, *SDPA)
    with pytest.raises(PaddingConfigError, match=rf"=flash_attention_2: {PACKED} .*{kind}.* Set .*=sdpa, or"):
        refuse(kind)
    with pytest.raises(PaddingConfigError, match=rf"=flash_attention_2: {PACKED} .* Set critic\.model\.use_remove"):
        refuse(kind, role=critic_engine)


def test_a_critic_has_flash_attention_whatever_is_set():
    for kind in MASKS_NOT_TOLD:
        refuse(kind, "++critic.model.override_config.attn_implementation=eager", role=critic_engine)


@pytest.mark.parametrize("kind", NOT_TOLD)
def test_attention_that_is_never_told_is_refused(kind):
    for attention in ((), SDPA, EAGER):
        with pytest.raises(PaddingConfigError, match=rf"{PACKED} "):
            refuse(kind, *attention)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v4"])
def test_veomnis_own_code_keeps_rows_apart_with_its_flash_attention(kind):
    refuse(kind, *VEOMNI)


def test_chunks_of_all_that_is_packed_are_refused_where_a_micro_batch_is_longer():
    budgets = (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    )
    short = [f"{budget}=2048" for budget in budgets]
    with pytest.raises(
        PaddingConfigError,
        match=rf"{PACKED} .*attention_chunk_size=8192\).* Set {budgets[0]} and {budgets[1]} to 8192 at most, or ",
    ):
        refuse("llama4_text")
    refuse("llama4_text", *short)


@pytest.mark.parametrize("apart", [(), APART])
def test_tokens_that_are_chosen_among_all_are_refused_whether_rows_are_packed_or_padded(apart):
    told = r"chooses what a token attends to among all that is computed beside it"
    for attention in ((), SDPA, EAGER):
        with pytest.raises(PaddingConfigError, match=rf"{told} \(index_topk=2048\).* Choose another model\.$"):
            refuse("glm_moe_dsa", *attention, *apart)
        with pytest.raises(PaddingConfigError, match=rf"{told} \(keep_window_size=2048\).* Choose another model\.$"):
            refuse("doge", *attention, *apart)
    refuse("glm_moe_dsa", *VEOMNI, *apart)
    with pytest.raises(PaddingConfigError, match=told):
        refuse("doge", *VEOMNI, *apart)


@pytest.mark.parametrize("kind", ["nemotron_h", "bloom", "ministral3", "doge"])
def test_rows_that_are_computed_one_by_one_are_apart(kind):
    one_by_one = (
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    )
    refuse(kind, *one_by_one)
    with pytest.raises(PaddingConfigError):  # ranks that share a row exchange it around attention alone
        refuse(kind, *one_by_one, *BY_TWO)
    with pytest.raises(PaddingConfigError):
        refuse(kind, *one_by_one[:-1], "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2")


@pytest.mark.parametrize("kind", TOLD_BY_VEOMNI)
def test_flash_attention_that_veomni_tells_lengths_keeps_rows_apart(kind):
    refuse(kind, *VEOMNI)
    with pytest.raises(
        PaddingConfigError, match=r"Set .*attn_implementation=sdpa and ulysses_sequence_parallel_size=1, or"
    ):
        refuse(kind, *BY_TWO)


def test_a_job_of_such_a_model_is_refused_and_goes_where_rows_are_apart(tmp_path):
    transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    job = [*DYNAMIC, "+padding=prompt", f"{MODEL}.path={tmp_path}"]
    with pytest.raises(PaddingConfigError, match=rf"{PACKED} layers of this model \(conv\)"):
        check_job(compose_job(*job))
    check_job(compose_job(*job, *APART, "padding.packer=plan"))


def outputs_of_a_row(model, before):
    """Its logits as verl's FSDP engines compute packed rows, behind a row of so many other tokens."""
    drawn = torch.Generator().manual_seed(1)
    row = torch.randint(3, 60, (1, 41), generator=drawn)
    other = torch.randint(3, 60, (1, before), generator=drawn)
    positions = torch.cat([torch.arange(before), torch.arange(41)])[None]
    with torch.no_grad():
        logits = model(
            input_ids=torch.cat([other, row], 1), attention_mask=None, position_ids=positions, use_cache=False
        ).logits
    return logits[:, before:]


LEAKS = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"word_embed_proj_dim": 32},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4},
    "doge": {"keep_window_size": 4},
}
APART_ALWAYS = ["qwen3", "llama", "mistral", "gemma2", "olmo2", "granite"]


@pytest.mark.parametrize("kind", [*LEAKS, *APART_ALWAYS])
def test_what_is_refused_leaks(kind):
    """Where this fails, transformers keeps rows apart by position ids, and the refusal can go."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**TINY | LEAKS.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    alone, behind = outputs_of_a_row(model, 0), outputs_of_a_row(model, 13)
    leak = float((alone - behind).abs().max() / alone.abs().max())
    if kind in APART_ALWAYS:
        assert leak < 1e-5
        return
    assert leak > 1e-3
    with pytest.raises(PaddingConfigError, match=r"pads would change what|real rows would see pads"):
        refuse(kind, *EAGER, **config.to_dict())
