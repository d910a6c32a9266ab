"""Packed rows attended to by torch alone, beside flash-attn's documented semantics and
transformers' sdpa."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)
from transformers.masking_utils import causal_mask_function, or_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.fresh_processes import run_fresh
from tests.support.pages import ROOT
from verl_padding.errors import PaddingConfigError
from verl_padding.job.attention import PACKED
from verl_padding.worker import packed_attention, varlen_attention
from verl_padding.worker.packed_attention import (
    patch_attention_of,
    positions_unless_masked,
    use_packed_attention,
)

LENGTHS = [1, 7, 30, 2, 12]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


CONFIGS = {
    "all tokens before": Qwen2Config(**SIZES),
    "a window of 4 tokens in a layer": Gemma3TextConfig(**SIZES, **WINDOW),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_gives_packed_rows_the_outputs_and_gradients_of_sdpa(kind, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="sdpa").double()
    ids = torch.randint(64, (1, sum(LENGTHS)))
    packed = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}

    def outputs_and_gradients():
        logits = model(**packed, use_cache=False).logits
        return logits.detach(), torch.autograd.grad(
            logits.logsumexp(-1).square().sum(), list(model.parameters())
        )

    theirs = outputs_and_gradients()
    use_packed_attention(model)
    assert model.config._attn_implementation == PACKED
    rows = []
    attend = varlen_attention._attend_in_row
    monkeypatch.setattr(
        varlen_attention, "_attend_in_row", lambda *a: rows.append(len(a[1])) or attend(*a)
    )
    torch.testing.assert_close(outputs_and_gradients(), theirs, rtol=1e-12, atol=1e-12)
    assert rows == LENGTHS * 2, "pairs of tokens of two rows are computed"


KEPT = {
    "an attention of its own": DiffLlamaConfig(**SIZES),
    "a soft cap": Gemma2Config(**SIZES),
    "no layer that is causal": DogeConfig(**SIZES),
    "chunks": Qwen2Config(**SIZES, layer_types=["full_attention", "chunked_attention"]),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_model_that_torch_attends_to_in_another_way_keeps_what_it_has(kind):
    config = KEPT[kind]
    if kind == "chunks":
        model = SimpleNamespace(config=config, modules=lambda: iter(()))
        config._attn_implementation = "sdpa"
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    use_packed_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_tokens_of_an_image_see_each_other():
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, -1]])
    given = {
        "batch_size": 1,
        "q_length": 7,
        "kv_length": 7,
        "q_offset": 0,
        "kv_offset": 0,
        "attention_mask": None,
    }
    given |= {"device": torch.device("cpu"), "dtype": torch.float32, "allow_is_causal_skip": False}

    def in_one_block(batch, head, query, key):
        return (blocks[batch, query] >= 0) & (blocks[batch, query] == blocks[batch, key])

    seen = or_masks(causal_mask_function, in_one_block)
    assert positions_unless_masked(mask_function=causal_mask_function, **given).tolist() == [
        [0, 1, 2, 3, 4, 5, 6]
    ]
    found = positions_unless_masked(mask_function=seen, **given)
    assert found.equal(sdpa_mask(mask_function=seen, **given))
    assert found[0, 0, 2, 4]

    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES), attn_implementation="sdpa")
    layer, states = (
        model.model.layers[0].self_attn,
        [torch.randn(1, heads, 7, 8) for heads in (4, 2, 2)],
    )
    packed_attention.register_packed_attention()
    both = [
        ALL_ATTENTION_FUNCTIONS[name](layer, *states, found, sliding_window=None)[0]
        for name in (PACKED, "sdpa")
    ]
    assert both[0].equal(both[1])


def engine_of(model, **config):
    config = {
        "strategy": "fsdp2",
        "use_remove_padding": True,
        "ulysses_sequence_parallel_size": 1,
    } | config
    return SimpleNamespace(
        module=model, engine_config=SimpleNamespace(**config), keep_rows_apart=lambda: None
    )


def test_ranks_that_share_a_row_are_refused_without_an_exchange():
    def sdpa(config):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    patch_attention_of(
        engine_of(sdpa(CONFIGS["all tokens before"]), ulysses_sequence_parallel_size=2)
    )
    patch_attention_of(engine_of(sdpa(KEPT["a soft cap"])))
    with pytest.raises(PaddingConfigError, match="ulysses_sequence_parallel_size=2"):
        patch_attention_of(engine_of(sdpa(KEPT["a soft cap"]), ulysses_sequence_parallel_size=2))


def packed_and_alone(model):
    """Logits (tokens, vocabulary) of packed rows by torch's attention, and of each row alone by
    sdpa."""
    ids = torch.randint(3, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    rows = ids.split(LENGTHS, dim=1)
    model.eval()
    with torch.no_grad():
        alone = torch.cat([model(row, use_cache=False).logits[0] for row in rows])
        use_packed_attention(model)
        assert model.config.get_text_config()._attn_implementation == PACKED
        places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        return [model(ids, position_ids=places, use_cache=False).logits[0], alone]


KEEP_POSITIONS = {
    "ministral3": {"num_key_value_heads": 2, "head_dim": 8},
    "persimmon": {},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@pytest.mark.parametrize("family", KEEP_POSITIONS)
def test_layers_that_do_not_hand_position_ids_on_keep_rows_apart(family):
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name not in ("num_key_value_heads", "head_dim")
    }
    config = AutoConfig.for_model(family, **sizes | KEEP_POSITIONS[family])
    torch.manual_seed(0)
    found, wanted = packed_and_alone(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def stock_configs_of_no_window():
    """Of transformers' types, those whose config says by a number that no layer has a window."""
    found = []
    for config in map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING):
        try:
            text = config().get_text_config()
        except Exception:  # some need arguments
            continue
        if getattr(text, "sliding_window", None) in (0, -1, False):
            found.append(type(text))
    return found


@pytest.mark.parametrize("window", [{}, {"use_sliding_window": True, "max_window_layers": 0}])
def test_a_window_that_no_layer_has_is_none(window):
    types = stock_configs_of_no_window()
    assert Qwen2MoeConfig in types
    for of_type in types:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = of_type(**SIZES, **experts, shared_expert_intermediate_size=32, **window)
        torch.manual_seed(0)
        how = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        found, wanted = packed_and_alone(AutoModelForCausalLM.from_config(config, **how).double())
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


QWEN_VL = """
import sys
import verl_padding.on_cpu
import torch
from transformers import AutoModelForImageTextToText
from verl.models.transformers.monkey_patch import apply_monkey_patch
from tests.support.vision_rows import make_vision_model
from verl_padding.worker.packed_attention import use_packed_attention
from verl_padding.verl_fixes.text_without_image import give_features_alone
folder, how = make_vision_model("qwen2_5_vl", sys.argv[1]), {"attn_implementation": "sdpa"}
model = AutoModelForImageTextToText.from_pretrained(folder, **how).bfloat16().eval()
torch.manual_seed(0)
rows = torch.randint(3, 50, (1, 12)).split([5, 7], dim=1)
def logits(*rows):
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])
    ids = torch.cat(rows, dim=1)
    with torch.no_grad():
        output = model(input_ids=ids, position_ids=places.expand(4, 1, -1), use_cache=False)
        return output.logits[0].float()
alone = torch.cat([logits(row) for row in rows])
apply_monkey_patch(model, ulysses_sp_size=1, use_remove_padding=True)
give_features_alone(model)
use_packed_attention(model)
for found in (logits(*rows), torch.cat([logits(row) for row in rows])):
    assert (found - alone).norm() < 0.02 * alone.norm(), (found - alone).norm() / alone.norm()
assert (logits(rows[1], rows[0])[7:] - alone[:5]).norm() < 0.02 * alone[:5].norm()
"""
"""In a process of its own: verl changes the class."""


def test_verls_own_attention_of_qwen2_5_vl_needs_no_flash_attn(tmp_path):
    run = run_fresh(QWEN_VL, str(tmp_path), platform="cpu", folder=ROOT)
    assert run.returncode == 0, run.stderr
