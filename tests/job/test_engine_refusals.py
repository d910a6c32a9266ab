"""Models that do not go with the engines of a job are refused, as their configs show them, before a worker starts."""

import re

import pytest
import transformers

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import check_model
from verl_padding.job.job_reader import check_job

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
RATE = "megatron.override_transformer_config.moe_router_bias_update_rate"
EXPERTS_CUT = "megatron.expert_tensor_parallel_size"
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


VEOMNI_BY_TWO = ("model_engine=veomni", f"{ACTOR}.veomni.ulysses_parallel_size=2")


def test_attention_in_a_models_own_code_is_refused_where_this_code_has_no_exchange(tmp_path):
    eager = f"{ACTOR}.veomni.attn_implementation=eager"
    for model in (transformers.Qwen2Config(**SMALL), mixture()):
        with pytest.raises(
            PaddingConfigError, match=rf"^{ACTOR}\.veomni\.attn_implementation=eager: does not support Ulysses"
        ):
            check(model, tmp_path, *VEOMNI_BY_TWO, eager)
        check(model, tmp_path, "model_engine=veomni", eager)
        check(model, tmp_path, *VEOMNI_BY_TWO)
    check(transformers.DeepseekV4Config(**SMALL), tmp_path, *VEOMNI_BY_TWO, eager)


DYNAMIC_ROPE = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"llm_config": DYNAMIC_ROPE, "vision_config": {}}, "rope_type='dynamic'"),
        ({"thinker_config": {"text_config": DYNAMIC_ROPE}}, "rope_type='dynamic'"),
        ({"thinker_config": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}}},
         "rope_type='longrope'"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "rope_type='su'"),
        ({"use_dynamic_ntk": True, "rope_scaling": None}, "use_dynamic_ntk=True"),
    ],
)  # fmt: skip
def test_rows_do_not_share_wherever_the_config_of_a_text_part_says_it(model, message):
    def refuse(sharing: str) -> None:
        check_model("critic.model.path=a/model", model, [], PaddingConfig(packer="plan", sharing=sharing))

    refuse("off")
    with pytest.raises(
        PaddingConfigError,
        match=rf"^padding\.sharing='chains': critic.model.path=a/model .*\({re.escape(message)}\).*sharing=off\.$",
    ):
        refuse("chains")
