"""verl's FSDP2 engines on a CPU: what they refuse as they are built, with or without padding."""

from types import SimpleNamespace

import pytest

from verl_padding.errors import PaddingConfigError
from verl_padding.local import fsdp2_engines


class Engine:
    """In the place of verl's."""

    def __init__(self, attention: str | None, ranks: int) -> None:
        chosen = {} if attention is None else {"attn_implementation": attention}
        self.model_config = SimpleNamespace(override_config=chosen)
        self.engine_config = SimpleNamespace(strategy="fsdp2", ulysses_sequence_parallel_size=ranks)


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
@pytest.mark.parametrize(("attention", "told"), [("eager", "eager"), (None, "flash_attention_2")])
def test_attention_past_the_exchange_between_ranks_that_share_rows_is_refused(kind, attention, told, registered):
    with pytest.raises(
        PaddingConfigError,
        match=rf"^override_config\.attn_implementation={told}: does not support Ulysses.* 2 .* to sdpa, or ulysses_",
    ):
        registered[kind](attention, 2)
    registered[kind](attention, 1)
    registered[kind]("sdpa", 2)
