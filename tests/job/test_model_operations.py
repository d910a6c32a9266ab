"""Operations of every language model that transformers has, beside those of its forward pass."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.plan.test_transformer_cost import measured
from verl_padding.job.model_operations import model_cost
from verl_padding.plan import PlanError
from verl_padding.plan.transformer_cost import FULL, LINEAR

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "pad_token_id": 0,
}
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOKENS = 40
TAKEN = {
    *("cohere2", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss"),
    *("granite", "llama", "mistral", "mixtral", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "smollm3"),
}
"""Types that must not be refused."""


def small_config(model_type):
    """A config of a type with small sizes; None where its own defaults do not make one."""
    made = CONFIG_MAPPING[model_type]
    try:
        defaults = made().to_dict()
        sizes = {name: size for name, size in SMALL.items() if defaults.get(name)}
        if LINEAR in (defaults.get("layer_types") or ()):
            sizes["layer_types"] = [FULL] * SMALL["num_hidden_layers"]
        return made(**sizes)
    except (ValueError, TypeError, StrictDataclassError):
        return None


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_costs_what_its_forward_pass_takes_or_is_refused(model_type):
    config = small_config(model_type)
    if config is None or "text_config" in config.to_dict():
        assert model_type not in TAKEN
        pytest.skip("no small language model of this type")
    try:
        cost = model_cost(config.to_dict(), lm_head=True)
    except PlanError:
        assert model_type not in TAKEN
        return
    pairs = (cost.full_layers + cost.sliding_layers) * TOKENS**2
    got = cost.linear * TOKENS + cost.attention * pairs
    assert got == pytest.approx(measured(config, TOKENS), rel=0.015)
