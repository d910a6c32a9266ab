"""verl's Megatron engine on a CPU: nothing changes before an engine is built."""

from types import SimpleNamespace

import pytest
import torch

from tests.engines.megatron import engines


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


def test_a_loaded_optimizer_goes_on_with_the_steps_of_its_checkpoint_in_each_weight():
    megatron_core = pytest.importorskip("tests.engines.megatron.megatron_core", reason="needs megatron-core")
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
