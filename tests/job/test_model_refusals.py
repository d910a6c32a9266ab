"""Models that do not go with the engines of a job are refused, as their configs show them, before a worker starts."""

import re

import pytest
import transformers

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.job_reader import check_job
from verl_padding.job.model_refusals import refuse_model

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
RATE = "megatron.override_transformer_config.moe_router_bias_update_rate"
EXPERTS_CUT = "megatron.expert_tensor_parallel_size"
ON_A_CPU = ("+local=cpu_megatron",)
ULYSSES_ON_A_CPU = ("+local=cpu", f"{ACTOR}.ulysses_sequence_parallel_size=2")
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}


def check(model, folder, *overrides):
    """Checks a padded job of this actor; a critic, where there is one, has another model."""
    model.save_pretrained(folder / "actor")
    transformers.Qwen2Config(**SMALL).save_pretrained(folder / "critic")
    paths = (f"actor_rollout_ref.model.path={folder / 'actor'}", f"critic.model.path={folder / 'critic'}")
    check_job(compose_job(*DYNAMIC, "+padding=prompt", *paths, *overrides))


def with_sizes(*sizes):
    """Of the engines of all roles, which share their groups."""
    return ["model_engine=megatron", *(f"{role}.megatron.{size}" for role in (ACTOR, REF, CRITIC) for size in sizes)]


def mixture(**changes):
    return transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, **changes)


def deepseek():
    return transformers.DeepseekV3Config(**SMALL, n_routed_experts=8, n_group=2, topk_group=1)


@pytest.mark.parametrize("vanilla", ["true", "false"])
def test_biases_of_experts_that_a_bridge_has_follow_tokens_are_refused(vanilla, tmp_path):
    job = ("model_engine=megatron", f"{ACTOR}.megatron.vanilla_mbridge={vanilla}")
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.{RATE}=None: .* type deepseek_v3, .* Set it to 0\.$"):
        check(deepseek(), tmp_path, *job)
    check(deepseek(), tmp_path, *job, f"+{ACTOR}.{RATE}=0")
    check(
        deepseek(), tmp_path, *job, f"+{ACTOR}.megatron.override_transformer_config.moe_router_enable_expert_bias=false"
    )
    check(deepseek(), tmp_path)  # FSDP's engines leave them as they are


def test_biases_of_experts_that_a_bridge_leaves_as_they_are_are_not(tmp_path):
    check(transformers.Glm4MoeConfig(**SMALL, n_routed_experts=8), tmp_path, "model_engine=megatron")
    check(mixture(), tmp_path, "model_engine=megatron")


@pytest.mark.parametrize(("tensor", "of_expert"), [(2, 1), (1, 2)])
def test_copies_of_experts_whose_gradients_megatron_adds_up_over_other_ranks_are_refused(tensor, of_expert, tmp_path):
    cut = f"tensor_model_parallel_size={tensor}", f"expert_tensor_parallel_size={of_expert}"
    with pytest.raises(
        PaddingConfigError, match=rf"^{ACTOR}\.{EXPERTS_CUT}={of_expert}: with .* Set it to {tensor}\.$"
    ):
        check(mixture(), tmp_path, *with_sizes(*cut))
    check(mixture(), tmp_path, *with_sizes(*cut, "expert_model_parallel_size=2"))
    check(mixture(), tmp_path, *with_sizes(cut[0], f"expert_tensor_parallel_size={tensor}"))
    check(transformers.Qwen2Config(**SMALL), tmp_path, *with_sizes(*cut))


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_experts_that_cannot_be_dealt_out_evenly_are_refused(engine, tmp_path):
    setting = "expert_model_parallel_size" if engine == "megatron" else "expert_parallel_size"
    sizes = {ranks: [f"{role}.{engine}.{setting}={ranks}" for role in (ACTOR, REF, CRITIC)] for ranks in (4, 8)}
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.{engine}\.{setting}=8: .* has 4\. Set it to a divisor"):
        check(mixture(), tmp_path, f"model_engine={engine}", *sizes[8])
    check(mixture(), tmp_path, f"model_engine={engine}", *sizes[4])
    check(transformers.Qwen2Config(**SMALL), tmp_path, f"model_engine={engine}", *sizes[8])


@pytest.mark.parametrize("model", [mixture(), transformers.Ernie4_5_MoeConfig(**SMALL)], ids=["Qwen3", "Ernie"])
def test_experts_that_megatron_trains_with_sequence_parallel_alone_are_refused_without_it(model, tmp_path):
    cut, off = "tensor_model_parallel_size=2", "sequence_parallel=false"
    overridden = [f"++{role}.megatron.override_transformer_config.{off}" for role in (ACTOR, REF, CRITIC)]
    section = rf"^{ACTOR}\.megatron\."
    with pytest.raises(PaddingConfigError, match=rf"{section}sequence_parallel=False: .* Set it to True\.$"):
        check(model, tmp_path, *with_sizes(cut, off))
    # The vanilla bridge has it where ranks are tensor parallel.
    check(model, tmp_path, *with_sizes(cut, off, "vanilla_mbridge=true"))
    for bridge in ("true", "false"):
        with pytest.raises(
            PaddingConfigError, match=rf"{section}override_transformer_config\.sequence_parallel=False:"
        ):
            check(model, tmp_path, *with_sizes(cut, f"vanilla_mbridge={bridge}"), *overridden)
    check(model, tmp_path, *with_sizes(cut))
    check(model, tmp_path, *with_sizes(off))
    check(transformers.Qwen2Config(**SMALL), tmp_path, *with_sizes(cut, off))


@pytest.mark.parametrize(
    ("changes", "ranks", "told"),
    [
        ({"num_attention_heads": 6}, 4, "num_attention_heads=6. Set it to 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads=3. Set it to 1"),
        ({"vocab_size": 261}, 2, rf"vocab_size=261. Set it to 1, or {ACTOR}.megatron.vanilla_mbridge to False"),
        ({"num_attention_heads": 4}, 4, None),
        ({"vocab_size": 261}, 1, None),
    ],
)
def test_heads_and_vocabularies_that_megatrons_ranks_cannot_share_are_refused(changes, ranks, told, tmp_path):
    model = transformers.Qwen2Config(**SMALL | {"vocab_size": 320} | changes)
    sizes = with_sizes(f"tensor_model_parallel_size={ranks}", "vanilla_mbridge=true")
    if told is None:
        check(model, tmp_path, *sizes)
        return
    with pytest.raises(
        PaddingConfigError, match=rf"^{ACTOR}\.megatron\.tensor_model_parallel_size={ranks}: .* has {told}\.$"
    ):
        check(model, tmp_path, *sizes)


def test_sizes_are_told_of_the_actor_from_which_its_reference_has_them(tmp_path):
    model = transformers.Qwen2Config(**SMALL | {"num_hidden_layers": 3})
    kl = f"{ACTOR}.use_kl_loss=true"
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.megatron\.pipeline_model_parallel_size=2: "):
        check(model, tmp_path, kl, "model_engine=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2")


def test_the_size_that_is_advised_divides_the_ranks_with_the_others(tmp_path):
    model = transformers.Qwen2Config(**SMALL | {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 320})
    job = ["trainer.n_gpus_per_node=12", *with_sizes("pipeline_model_parallel_size=2")]
    cut = [f"{role}.megatron.tensor_model_parallel_size={{}}" for role in (ACTOR, REF, CRITIC)]
    with pytest.raises(
        PaddingConfigError, match=r"tensor_model_parallel_size=6: .*num_attention_heads=16\. Set it to 2\."
    ):
        check(model, tmp_path, *job, *(each.format(6) for each in cut))
    check(model, tmp_path, *job, *(each.format(2) for each in cut))


def test_a_vocabulary_that_megatron_bridge_makes_larger_is_not(tmp_path):
    model = transformers.Qwen2Config(**SMALL, vocab_size=261)
    check(model, tmp_path, *with_sizes("tensor_model_parallel_size=2", "vanilla_mbridge=false"))


@pytest.mark.parametrize(
    ("layers", "virtual", "told"),
    [
        (3, "null", r"pipeline_model_parallel_size=2: the 2 stages of"),
        (6, "2", r"virtual_pipeline_model_parallel_size=2: the 4 stages \(2 x 2 virtual ones\) of"),
        (4, "2", None),
        (6, "null", None),
    ],
)
def test_layers_that_do_not_fill_a_pipeline_evenly_are_refused(layers, virtual, told, tmp_path):
    model = transformers.Qwen2Config(**SMALL | {"num_hidden_layers": layers})
    two = ("pipeline_model_parallel_size=2", f"virtual_pipeline_model_parallel_size={virtual}")
    if told is None:
        check(model, tmp_path, *with_sizes(*two))
        return
    with pytest.raises(
        PaddingConfigError,
        match=rf"^{ACTOR}\.megatron\.{told} .* has num_hidden_layers={layers}\. Set it to (null|another size), or",
    ):
        check(model, tmp_path, *with_sizes(*two))
    last = f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2"
    check(model, tmp_path, *with_sizes(*two), last)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("model", "lacks"),
    [
        (transformers.Qwen2Config(**SMALL, rope_parameters=YARN), r"rope_type='yarn'"),
        (transformers.Glm4MoeConfig(**SMALL), r"partial_rotary_factor=0\.5"),
        (transformers.Gemma3TextConfig(**SMALL), "rotary embeddings for each kind of layer"),
        (transformers.Qwen2_5_VLConfig(), "a vision tower"),
        (
            transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding_window=8",
        ),
        (transformers.Qwen2Config(**SMALL, attention_dropout=0.1), r"attention_dropout=0\.1"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_a_model_that_megatron_on_a_cpu_would_compute_without_a_part_is_refused(model, lacks, tmp_path):
    with pytest.raises(PaddingConfigError, match=rf"^actor_rollout_ref\.model\.path=.*: on a CPU, .* has {lacks}\. "):
        check(model, tmp_path, *ON_A_CPU)
    check(transformers.Qwen2Config(**SMALL), tmp_path, *ON_A_CPU)
    check(model, tmp_path, "+local=cpu")


def test_latent_attention_is_refused_by_megatron_on_a_cpu(tmp_path):
    rate = f"+{ACTOR}.{RATE}=0"
    with pytest.raises(PaddingConfigError, match=r"^actor_rollout_ref\.model\.path=.* has kv_lora_rank=512\. "):
        check(deepseek(), tmp_path, *ON_A_CPU, rate)
    check(deepseek(), tmp_path, "model_engine=megatron", rate)


def test_so_is_that_of_a_critic(tmp_path):
    transformers.Qwen2Config(**SMALL, rope_parameters=YARN).save_pretrained(tmp_path / "scaled")
    critic = ("algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'scaled'}")
    with pytest.raises(PaddingConfigError, match=r"^critic\.model\.path=.*: on a CPU, .* has rope_type='yarn'\."):
        check(transformers.Qwen2Config(**SMALL), tmp_path, *ON_A_CPU, *critic)


def test_dropout_that_the_job_turns_off_is_not(tmp_path):
    off = f"+{ACTOR}.megatron.override_transformer_config.attention_dropout=0"
    check(transformers.Qwen2Config(**SMALL, attention_dropout=0.1), tmp_path, *ON_A_CPU, off)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window=8"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
    ],
)
def test_a_model_whose_attention_ulysses_on_a_cpu_does_not_exchange_is_refused(changes, lacks, tmp_path):
    model = transformers.Qwen2Config(**SMALL, **changes)
    with pytest.raises(
        PaddingConfigError, match=rf"^ulysses_sequence_parallel_size=2: on a CPU, .* {ACTOR} has {lacks}\. Set it to 1"
    ):
        check(model, tmp_path, *ULYSSES_ON_A_CPU)
    check(model, tmp_path, "+local=cpu")
    check(transformers.Qwen2Config(**SMALL), tmp_path, *ULYSSES_ON_A_CPU)


VEOMNI_BY_TWO = ("model_engine=veomni", f"{ACTOR}.veomni.ulysses_parallel_size=2")


def test_attention_in_a_models_own_code_is_refused_where_this_code_has_no_exchange(tmp_path):
    eager = f"{ACTOR}.veomni.attn_implementation=eager"
    for model in (transformers.Qwen2Config(**SMALL), mixture()):
        with pytest.raises(
            PaddingConfigError, match=rf"^{ACTOR}\.veomni\.attn_implementation=eager: passes by .* 2 ranks"
        ):
            check(model, tmp_path, *VEOMNI_BY_TWO, eager)
        check(model, tmp_path, "model_engine=veomni", eager)
        check(model, tmp_path, *VEOMNI_BY_TWO)
    check(transformers.DeepseekV4Config(**SMALL), tmp_path, *VEOMNI_BY_TWO, eager)


@pytest.mark.parametrize(
    ("job", "setting"),
    [
        ((f"{ACTOR}.ulysses_sequence_parallel_size=4",), "ulysses_sequence_parallel_size"),
        ((*VEOMNI_BY_TWO, f"{ACTOR}.veomni.ulysses_parallel_size=4"), "ulysses_parallel_size"),
    ],
    ids=["FSDP", "VeOmni"],
)
def test_heads_that_ranks_cannot_share_are_refused(job, setting, tmp_path):
    for heads, shared, told in (
        (6, 2, "num_attention_heads=6"),
        (12, 3, "num_key_value_heads=3"),
        (8, 2, ""),
        (4, 4, ""),
    ):
        model = transformers.Qwen2Config(**SMALL | {"num_attention_heads": heads, "num_key_value_heads": shared})
        check(model, tmp_path)
        if told:
            with pytest.raises(
                PaddingConfigError, match=rf"^{setting}=4: so many .* of {ACTOR}, .* has {told}\. Set it"
            ):
                check(model, tmp_path, *job)
        else:
            check(model, tmp_path, *job)


def test_heads_of_a_critic_that_ranks_cannot_share_are_refused(tmp_path):
    critic = ("algorithm.adv_estimator=gae", "critic.fsdp.ulysses_sequence_parallel_size=4")
    with pytest.raises(
        PaddingConfigError, match=r"^ulysses_sequence_parallel_size=4: .* of critic, .*heads=2\. Set it"
    ):
        check(transformers.Qwen2Config(**SMALL), tmp_path, *critic)


def test_images_that_verls_scheduler_does_not_deal_out_are_refused(tmp_path):
    settings = ("dynamic_context_parallel=true", "max_seqlen_per_dp_cp_rank=4096")
    job = ["model_engine=megatron", *(f"{ACTOR}.megatron.{setting}" for setting in settings)]
    with pytest.raises(PaddingConfigError, match=rf"^{ACTOR}\.megatron\.dynamic_context_parallel=True: .* images, and"):
        check(transformers.Qwen2_5_VLConfig(), tmp_path, *job)
    check(transformers.Qwen2Config(**SMALL), tmp_path, *job)


DYNAMIC_ROPE = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"llm_config": DYNAMIC_ROPE, "vision_config": {}}, "rope_type='dynamic'"),
        ({"thinker_config": {"text_config": DYNAMIC_ROPE}}, "rope_type='dynamic'"),
        ({"thinker_config": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}}},
         "rope_type='longrope'"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "rope_type='su'"),
        ({"use_dynamic_ntk": True, "rope_scaling": None}, "use_dynamic_ntk=True"),
        ({"language_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention=True"),
        ({"llm_config": {"text_config": {"is_causal": False}}}, "is_causal=False"),
    ],
)  # fmt: skip
def test_rows_do_not_share_wherever_the_config_of_a_text_part_says_it(model, told):
    def refuse(sharing: str) -> None:
        refuse_model("critic", "a/model", model, [], PaddingConfig(packer="plan", sharing=sharing))

    refuse("off")
    with pytest.raises(
        PaddingConfigError,
        match=rf"^padding\.sharing='chains': .* model of critic .*\({re.escape(told)}\).*sharing=off\.$",
    ):
        refuse("chains")


def test_towers_may_see_all_of_an_image_or_a_sound():
    towers = {"vision_config": {"is_causal": False}, "thinker_config": {"audio_config": {"is_causal": False}}}
    refuse_model("critic", "a/model", towers, [], PaddingConfig(packer="plan", sharing="chains"))
