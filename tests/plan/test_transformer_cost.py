"""Operations of a model by its config, against what its forward pass is measured to take."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from verl.utils import flops_counter

from verl_padding.plan import PlanError
from verl_padding.plan.transformer_cost import LINEAR, UNIT, TransformerCost

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2 tied": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2 sliding": transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3, wide heads": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "llama": transformers.LlamaConfig(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=8),
    "gemma2": transformers.Gemma2Config(**SHAPE, head_dim=8, sliding_window=8),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, **MOE, head_dim=8),
    "qwen3_moe, one dense layer": transformers.Qwen3MoeConfig(
        **SHAPE, **MOE, head_dim=8, mlp_only_layers=[1]
    ),
    "qwen2_moe, shared expert": transformers.Qwen2MoeConfig(
        **SHAPE, **MOE, shared_expert_intermediate_size=40
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
HYBRID = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
FULL = {"layer_types": ["full_attention"] * 3}
EXPERT = {"shared_expert_intermediate_size": 40}
CONFIGS |= {
    "qwen3_5_text": transformers.Qwen3_5TextConfig(**SHAPE, **HYBRID, **FULL),
    "qwen3_next": transformers.Qwen3NextConfig(**SHAPE, **HYBRID, **MOE, **FULL, **EXPERT),
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(
        **SHAPE, **HYBRID, **MOE, **FULL, **EXPERT
    ),
}
ALL_EXPERTS = CONFIGS["qwen3_5_moe_text"].to_dict() | {"intermediate_size": None}
LENGTHS = (1, 7, 8, 9, 40)


def measured(config, length):
    """Operations of a forward pass, counted by torch; its kernels compute masked pairs as well."""
    torch.manual_seed(0)
    # Experts one after the other, each on its tokens: then all of their products are seen by the
    # counter.
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", **experts
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, config.vocab_size, (1, length)), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_of_a_measured_forward_pass(name):
    config = CONFIGS[name]
    cost = TransformerCost.from_config(config.to_dict())
    lengths = np.array(LENGTHS)
    pairs = (cost.full_layers + cost.sliding_layers) * lengths**2
    got = cost.linear * lengths + cost.attention * pairs
    want = np.array([measured(config, length) for length in LENGTHS])
    assert want[-1] > 10 * want[0] > 0
    # Left out: the rotary angles, an outer product of positions and frequencies.
    np.testing.assert_allclose(got, want, rtol=0.005)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_a_query_sees_itself_and_the_keys_before_it_within_its_window(window):
    def pairs(length):
        return sum(min(at, window or length) for at in range(1, length + 1))

    sliding = 0 if window is None else 2
    cost = TransformerCost(
        linear=1000, attention=7, full_layers=3, sliding_layers=sliding, window=window
    )
    for length in (1, 4, 5, 6, 60, 200):
        full = length * (length + 1) // 2
        want = 1000 * length + 7 * (3 * full + sliding * (pairs(length) if sliding else 0))
        assert cost.flops(np.array([length]))[0] == want


def test_layers_slide_where_the_config_says_so():
    layers = {
        name: TransformerCost.from_config(config.to_dict()) for name, config in CONFIGS.items()
    }
    found = [layers[name] for name in ("qwen2", "qwen2 sliding", "mistral", "gemma2")]
    assert [(cost.full_layers, cost.sliding_layers) for cost in found] == [
        (3, 0),
        (1, 2),
        (0, 3),
        (1, 2),
    ]
    plain = {
        key: value
        for key, value in CONFIGS["qwen2 sliding"].to_dict().items()
        if key != "layer_types"
    }
    assert TransformerCost.from_config(plain) == layers["qwen2 sliding"]
    assert TransformerCost.from_config(plain | {"use_sliding_window": False}) == layers["qwen2"]


def test_a_tied_head_takes_what_a_head_takes_and_a_critic_has_none():
    tied, free = (
        TransformerCost.from_config(CONFIGS[name].to_dict()) for name in ("qwen2 tied", "qwen2")
    )
    assert tied == free
    critic = TransformerCost.from_config(CONFIGS["qwen2"].to_dict(), lm_head=False)
    assert free.linear - critic.linear == 2 * SHAPE["hidden_size"] * SHAPE["vocab_size"]


def test_of_a_vision_language_model_the_text_counts():
    text = CONFIGS["qwen2"].to_dict()
    of_both = TransformerCost.from_config({"model_type": "some_vl", "text_config": text})
    assert of_both == TransformerCost.from_config(text)


@given(
    lengths=st.lists(st.integers(1, 131072), min_size=2, max_size=20, unique=True),
    name=st.sampled_from(sorted(CONFIGS)),
)
def test_longer_rows_cost_more_and_no_less_a_token(lengths, name):
    cost = TransformerCost.from_config(CONFIGS[name].to_dict())
    tokens = np.array(sorted(lengths))
    costs = cost(tokens)
    assert costs.dtype == np.int64
    assert costs[0] >= UNIT
    assert (np.diff(costs) > 0).all()
    assert (np.diff(costs / tokens) > -1 / tokens[:-1]).all(), (
        "but for the rounding to whole numbers"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kv_lora_rank": 512},
            r"model_type='qwen2' .*kv_lora_rank=512; choose cost_model=attention",
        ),
        ({"layer_types": ["linear_attention"]}, r"layer_types=linear_attention"),
        ({"hidden_size": None}, r"'hidden_size'"),
        ({"mamba_d_state": 16}, r"mamba_d_state=16"),
        ({"num_experts": 64}, r"'num_experts_per_tok'"),
        ({"intermediate_size": [48, 96]}, r"not 'list'"),
    ],
)
def test_a_model_whose_operations_are_not_known_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        TransformerCost.from_config(CONFIGS["qwen2"].to_dict() | change)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"])
def test_linear_attention_has_no_pairs_and_verls_count_of_operations(name):
    config = CONFIGS[name].to_dict() | {"layer_types": [LINEAR, LINEAR, "full_attention"]}
    cost = TransformerCost.from_config(config)
    assert cost.full_layers == 1
    in_verl = type("Config", (), config)
    of_attention, *_ = flops_counter._compute_qwen3_5_hybrid_attn_params(in_verl)
    recurrence = flops_counter._compute_qwen3_5_gdn_recurrence_flops(in_verl, 1, 2)
    rest = TransformerCost.from_config(CONFIGS[name].to_dict()).linear  # of full layers alone
    in_verl.layer_types = ["full_attention"] * 3
    of_full, *_ = flops_counter._compute_qwen3_5_hybrid_attn_params(in_verl)
    # verl's are of the update, which takes three passes.
    assert 3 * (cost.linear - rest) == 6 * (of_attention - of_full) + recurrence


def test_a_model_of_experts_alone_needs_no_width_of_a_dense_layer():
    of_both = TransformerCost.from_config(CONFIGS["qwen3_5_moe_text"].to_dict())
    assert TransformerCost.from_config(ALL_EXPERTS) == of_both
    assert TransformerCost.from_config(transformers.Qwen3_5MoeConfig().to_dict()).full_layers
    with pytest.raises(PlanError, match="'intermediate_size'"):
        TransformerCost.from_config(ALL_EXPERTS | {"mlp_only_layers": [0]})
