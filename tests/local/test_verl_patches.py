"""What is changed in verl on a CPU, each patch on a module in the place of verl's."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingConfigError
from verl_padding.local import verl_patches


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
    verl_patches.register_engines(module)
    return found


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_ranks_that_share_rows_are_refused_where_nothing_exchanges_their_tokens(kind, registered, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    registered[kind](1)
    with pytest.raises(PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* Set it to 1\.$"):
        registered[kind](2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_: None)  # as tests/engines does
    registered[kind](2)


def test_a_saved_shard_is_a_copy() -> None:
    parameter = torch.ones(3)
    module = ModuleType("fsdp_utils")
    module.fsdp2_sharded_save_to_cpu = lambda model: ({"w": (parameter.detach().cpu(), "spec")}, "global")
    verl_patches.copy_on_sharded_save(module)

    shards, spec = module.fsdp2_sharded_save_to_cpu(None)
    parameter.zero_()

    assert shards["w"][0].tolist() == [1.0, 1.0, 1.0]
    assert (shards["w"][1], spec) == ("spec", "global")
