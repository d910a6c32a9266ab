"""Attention of ranks that share a row, on a CPU: what the exchange does not carry is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingConfigError
from verl_padding.local.ulysses import STRATEGY_OF_GROUP, attention_of_packed_rows, exchange_around_sdpa

GROUP = object()
"""In the place of the process group of two ranks that share rows."""


@pytest.fixture
def attention():
    """The attention under the name ``sdpa``, for two ranks that share rows."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    exchange_around_sdpa(
        SimpleNamespace(
            get_ulysses_sequence_parallel_world_size=lambda: 2, get_ulysses_sequence_parallel_group=lambda: GROUP
        )
    )
    yield ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own


@pytest.mark.parametrize("other", [{"sliding_window": 4}, {"dropout": 0.1}])
@pytest.mark.parametrize(
    ("strategies", "setting"),
    [({}, "ulysses_sequence_parallel_size"), ({GROUP: "veomni"}, "ulysses_parallel_size")],
    ids=["FSDP2", "VeOmni"],
)
def test_attention_that_the_exchange_does_not_carry_is_refused(strategies, setting, other, attention, monkeypatch):
    for group, strategy in strategies.items():
        monkeypatch.setitem(STRATEGY_OF_GROUP, group, strategy)
    states = torch.zeros(1, 2, 6, 4)
    with pytest.raises(PaddingConfigError, match=rf"^{setting}=2: .* Set it to 1\.$"):
        attention(None, states, states, states, None, position_ids=torch.arange(6)[None], **other)


def test_attention_of_text_without_position_ids_is_refused_and_that_of_images_is_not_exchanged(
    attention,
):
    states = torch.zeros(1, 2, 6, 4)
    text, images = torch.nn.Module(), torch.nn.Module()
    text.is_causal, images.is_causal = True, False
    with pytest.raises(
        PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* Module passes none .* to 1\.$"
    ):
        attention(text, states, states, states, None)
    assert attention(images, states, states, states, None)[0].shape == (1, 6, 2, 4)


@pytest.mark.parametrize("given", [{}, {"is_causal": False}])
def test_attention_to_later_tokens_is_refused(given, attention):
    states = torch.zeros(1, 2, 6, 4)
    text = torch.nn.Module()
    text.is_causal = bool(given)
    with pytest.raises(
        PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* to later tokens .* Set it to 1\.$"
    ):
        attention(text, states, states, states, None, position_ids=torch.arange(6)[None], **given)


def test_packed_rows_attend_to_themselves_alone():
    query, key, value = torch.randn(3, 1, 7, 4, 8, dtype=torch.float64)
    key, value = key[:, :, :2], value[:, :, :2]  # heads that queries share
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    together = attention_of_packed_rows(query, key, value, None, 7, position_ids=position_ids, softmax_scale=0.5)
    for rows in (slice(0, 3), slice(3, 7)):
        scores = torch.einsum("qhd,khd->hqk", query[0, rows], key[0, rows].repeat_interleave(2, 1)) * 0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        alone = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[0, rows].repeat_interleave(2, 1))
        torch.testing.assert_close(together[0, rows], alone)
