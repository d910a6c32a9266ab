"""Attention of packed rows on a CPU, beside the one that masks all pairs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.local import row_attention
from verl_padding.local.row_attention import attend_row_by_row

LENGTHS = [1, 7, 30, 2, 12]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "sdpa",
}
CONFIGS = {
    "all tokens before": Qwen2Config(**SIZES),
    "a window of 4 tokens in a layer": Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.fixture
def row_by_row(monkeypatch):
    """Numbers of rows that attention was called with, one after the other."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend_row_by_row)
    called = []

    def counted(module, query, *args, **kwargs):
        called.append(query.shape[2])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(row_attention, "sdpa_attention_forward", counted)
    return called


def packed():
    ids = torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}


def logits_and_gradients(model):
    logits = model(**packed(), use_cache=False).logits
    return logits.detach(), torch.autograd.grad(logits.logsumexp(-1).square().sum(), list(model.parameters()))


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_rows_have_the_outputs_and_gradients_of_the_mask_over_all_pairs(kind: str, row_by_row: list[int]):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).double()
    ours = logits_and_gradients(model)
    assert row_by_row == LENGTHS * 2  # each layer, row by row
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    theirs = logits_and_gradients(model)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_packed_row_is_computed_to_the_last_bit_as_if_it_were_alone(row_by_row: list[int]):
    query, key, value = torch.randn(3, 1, 4, sum(LENGTHS), 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.block_diag(*[torch.ones(n, n).tril() for n in LENGTHS]).bool()[None, None]
    module = torch.nn.Module()
    of_all, _ = attend_row_by_row(module, query, key, value, mask)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        row = slice(begin, end)
        alone, _ = sdpa_attention_forward(module, query[:, :, row], key[:, :, row], value[:, :, row], None)
        assert of_all[:, row].equal(alone)


@pytest.mark.parametrize("seen", [(50, 3), (3, 50)], ids=["an earlier row", "a later row"])
def test_a_mask_that_shows_a_token_another_row_is_left_as_it_is(seen: tuple[int, int], row_by_row: list[int]):
    query, key, value = torch.randn(3, 1, 4, sum(LENGTHS), 8, generator=torch.Generator().manual_seed(0))
    mask = torch.block_diag(*[torch.ones(n, n).tril() for n in LENGTHS]).bool()[None, None]
    mask[0, 0, *seen] = True
    ours, _ = attend_row_by_row(torch.nn.Module(), query, key, value, mask)
    assert row_by_row == [sum(LENGTHS)]
    assert ours.equal(sdpa_attention_forward(torch.nn.Module(), query, key, value, mask)[0])
