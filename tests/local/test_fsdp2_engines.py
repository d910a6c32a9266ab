"""verl's FSDP2 engines on a CPU: what they refuse as they are built, with or without padding."""

from types import SimpleNamespace

import pytest
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingConfigError
from verl_padding.local import fsdp2_engines


class Engine:
    """In the place of verl's."""

    def __init__(self, ranks: int) -> None:
        self.engine_config = SimpleNamespace(ulysses_sequence_parallel_size=ranks)


@pytest.fixture
def registered():
    """The classes that are registered for device cpu, by model type."""
    found = {}

    def register(model_type, backend, device):
        assert (backend, device) == (["fsdp", "fsdp2"], "cpu")
        return lambda engine: found.setdefault(model_type, engine)

    module = SimpleNamespace(
        EngineRegistry=SimpleNamespace(register=register),
        FSDPEngineWithLMHead=Engine,
        FSDPEngineWithValueHead=Engine,
        CPUOffloadPolicy=object,
    )
    fsdp2_engines.register_engines(module)
    return found


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_ranks_that_share_rows_are_refused_where_nothing_exchanges_their_tokens(kind, registered, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    registered[kind](1)
    with pytest.raises(PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* Set it to 1\.$"):
        registered[kind](2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_: None)  # as tests/engines does
    registered[kind](2)
