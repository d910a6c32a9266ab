"""verl's VeOmni engine on a CPU: nothing changes beyond the start of an engine."""

from types import SimpleNamespace

import pytest
import torch

from tests.engines import veomni


class Engine:
    """In the place of verl's."""

    def __init__(self, module: SimpleNamespace, fails: bool = False) -> None:
        self.module, self.fails = module, fails

    def _build_model_optimizer(self) -> None:
        self.precision = self.module.MixedPrecisionConfig(enable=True)
        if self.fails:
            raise RuntimeError("out of memory")


@pytest.fixture
def module():
    """In the place of verl's, with the classes that are registered for device cpu, by model type."""
    found = {}

    def register(model_type, backend, device):
        assert (backend, device) == ("veomni", "cpu")
        return lambda engine: found.setdefault(model_type, engine)

    module = SimpleNamespace(
        EngineRegistry=SimpleNamespace(register=register),
        VeOmniEngineWithLMHead=Engine,
        VeOmniEngineWithValueHead=Engine,
        MixedPrecisionConfig=dict,
        registered=found,
    )
    veomni.register_engines(module)
    return module


def test_both_kinds_of_models_are_registered(module):
    assert set(module.registered) == {"language_model", "value_model"}
    assert all(issubclass(engine, Engine) for engine in module.registered.values())


@pytest.mark.parametrize("fails", [False, True])
def test_float32_is_all_that_changes_and_only_while_an_engine_builds_its_model(fails, module):
    engine = module.registered["value_model"](module, fails)
    if fails:
        with pytest.raises(RuntimeError):
            engine._build_model_optimizer()
    else:
        engine._build_model_optimizer()
    assert engine.precision == {"enable": True, "param_dtype": "float32"}
    assert engine._autocast_dtype == torch.float32
    assert module.MixedPrecisionConfig is dict
