"""verl's Megatron engine on a CPU: what is refused, and that nothing changes before an engine is built."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from verl.workers.config import McoreEngineConfig

from verl_padding.errors import PaddingConfigError
from verl_padding.local import engine_versions
from verl_padding.local.megatron import engines


class Engine:
    """In the place of verl's."""

    def __init__(self, *_: object) -> None:
        raise AssertionError("was built")


@pytest.fixture
def registered():
    """The classes that are registered for device cpu, by model type."""
    found = {}

    def register(model_type, backend, device):
        assert (backend, device) == ("megatron", "cpu")
        return lambda engine: found.setdefault(model_type, engine)

    module = SimpleNamespace(
        EngineRegistry=SimpleNamespace(register=register),
        MegatronEngineWithLMHead=Engine,
        MegatronEngineWithValueHead=Engine,
    )
    engines.register_engines(module)
    return found


def test_both_kinds_of_models_are_registered_and_nothing_of_cuda_is_changed(registered):
    assert set(registered) == {"language_model", "value_model"}
    assert all(issubclass(engine, Engine) for engine in registered.values())
    assert torch.cuda.Stream.__module__.startswith("torch")


@pytest.mark.parametrize("name", engine_versions.PLAIN)
def test_what_the_layers_for_a_cpu_do_not_have_is_refused(name):
    attention = pytest.importorskip("verl_padding.local.megatron.attention", reason="needs megatron-core")
    config = SimpleNamespace(**engine_versions.PLAIN | {name: (8, 0)})
    with pytest.raises(PaddingConfigError, match=rf"^override_transformer_config\.{name}=\(8, 0\): on a CPU"):
        attention.PackedAttention(config)


def test_rows_that_are_not_packed_are_refused_by_its_attention():
    attention = pytest.importorskip("verl_padding.local.megatron.attention", reason="needs megatron-core")
    states = torch.zeros(4, 1, 2, 8)
    with pytest.raises(PaddingConfigError, match=r"^packed_seq_params=None: on a CPU, .* Set use_remove_padding"):
        attention.PackedAttention.forward(None, states, states, states, torch.ones(1, 4, dtype=torch.bool))


def test_another_version_is_refused_before_anything_is_changed(registered, monkeypatch):
    monkeypatch.setattr(engine_versions, "version", lambda package: "9.9")
    with pytest.raises(
        PaddingConfigError, match=r"^megatron-core 9\.9: on a CPU.* pip install --no-deps megatron-core==0\.16\.1$"
    ):
        registered["language_model"](None, SimpleNamespace(vanilla_mbridge=True))
    assert torch.cuda.Stream.__module__.startswith("torch")


def test_another_megatron_on_pythons_path_is_refused(registered, monkeypatch):
    core = pytest.importorskip("megatron.core", reason="needs megatron-core")
    monkeypatch.setattr(core, "__version__", "0.99")
    model = SimpleNamespace(path="a/model", hf_config=LlamaConfig())
    with pytest.raises(PaddingConfigError, match=r"^megatron-core 0\.99: on a CPU.*==0\.16\.1$"):
        registered["language_model"](model, McoreEngineConfig(vanilla_mbridge=True))
    assert torch.cuda.Stream.__module__.startswith("torch")


def test_a_loaded_optimizer_goes_on_with_the_steps_of_its_checkpoint_in_each_weight():
    megatron_core = pytest.importorskip("verl_padding.local.megatron.megatron_core", reason="needs megatron-core")
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)

    def take_a_step() -> None:
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()

    def load(loaded) -> None:
        """As Megatron-Core's: steps of the checkpoint in the groups, and one tensor for all weights."""
        for group in loaded["param_groups"]:
            group["step"] = 6.0
        for state in loaded["state"].values():
            state["step"] = of_all
        optimizer.load_state_dict(loaded)

    take_a_step()
    of_all = torch.tensor(1.0)
    megatron_core._with_its_steps(load, SimpleNamespace(optimizer=optimizer), (optimizer.state_dict(),), {})
    take_a_step()
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [7.0] * 3
