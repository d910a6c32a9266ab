"""Tiny models are made without a network, once, and the same everywhere."""

import socket
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from verl_padding.on_cpu.tiny_models import (
    MODEL_TYPES,
    TinyModelKind,
    make_byte_tokenizer,
    make_tiny_model,
)

TOKENIZER = make_byte_tokenizer()


@pytest.mark.parametrize("kind", get_args(TinyModelKind))
def test_a_model_is_made_and_loaded_without_a_network(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    place = make_tiny_model(kind, tmp_path)
    auto_class = AutoModelForImageTextToText if kind == "qwen3_vl" else AutoModelForCausalLM
    model, tokenizer = auto_class.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert place.parent == tmp_path
    assert AutoConfig.from_pretrained(place).model_type == MODEL_TYPES.get(kind, kind)
    assert model.dtype == torch.float32
    assert model.config.get_text_config().vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 300_000


def test_the_seed_decides_the_weights_and_the_caller_keeps_its_own(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    places = [
        make_tiny_model("qwen2", tmp_path / folder, seed=seed)
        for folder, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert torch.equal(torch.rand(3), expected)
    one, same, other = [(place / "model.safetensors").read_bytes() for place in places]
    assert one == same
    assert one != other


@given(text=st.text(max_size=60))
def test_any_text_is_one_token_a_byte_and_comes_back(text):
    ids = TOKENIZER.encode(text, split_special_tokens=True)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text
