"""verl's VeOmni engine on a CPU: what is refused, and that nothing changes beyond the start of an engine."""

from types import SimpleNamespace

import pytest
import torch

from verl_padding.errors import PaddingConfigError
from verl_padding.local import engine_versions, veomni_engines


class Engine:
    """In the place of verl's."""

    def __init__(
        self, module: SimpleNamespace, fails: bool = False, group: object = None, attention: str = "sdpa"
    ) -> None:
        self.module, self.fails, self.ulysses_parallel_group = module, fails, group
        self.engine_config = SimpleNamespace(
            attn_implementation=attention, ulysses_parallel_size=1 if group is None else 2
        )

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
    veomni_engines.register_engines(module)
    return module


def test_both_kinds_of_models_are_registered(module):
    assert set(module.registered) == {"language_model", "value_model"}
    assert all(issubclass(engine, Engine) for engine in module.registered.values())


def test_another_version_is_refused(module, monkeypatch):
    monkeypatch.setattr(engine_versions, "version", lambda package: "9.9")
    with pytest.raises(PaddingConfigError, match=r"^veomni 9\.9: on a CPU.* pip install --no-deps veomni==0\.1\.12$"):
        module.registered["language_model"](module)


@pytest.mark.parametrize("fails", [False, True])
def test_float32_is_all_that_changes_and_only_while_an_engine_builds_its_model(fails, module, monkeypatch):
    monkeypatch.setattr(engine_versions, "version", engine_versions.TRIED["veomni"].get)
    engine = module.registered["value_model"](module, fails)
    if fails:
        with pytest.raises(RuntimeError):
            engine._build_model_optimizer()
    else:
        engine._build_model_optimizer()
    assert engine.precision == {"enable": True, "param_dtype": "float32"}
    assert engine._autocast_dtype == torch.float32
    assert module.MixedPrecisionConfig is dict


def test_ranks_that_share_rows_are_known_as_those_of_veomni(module, monkeypatch):
    monkeypatch.setattr(engine_versions, "version", engine_versions.TRIED["veomni"].get)
    monkeypatch.setattr(veomni_engines, "STRATEGY_OF_GROUP", {})
    module.registered["language_model"](module)
    assert veomni_engines.STRATEGY_OF_GROUP == {}
    module.registered["language_model"](module, group="two ranks")
    assert veomni_engines.STRATEGY_OF_GROUP == {"two ranks": "veomni"}


def test_attention_past_the_exchange_is_refused_of_a_job_without_padding_too(module, monkeypatch):
    monkeypatch.setattr(engine_versions, "version", engine_versions.TRIED["veomni"].get)
    monkeypatch.setattr(veomni_engines, "STRATEGY_OF_GROUP", {})
    with pytest.raises(
        PaddingConfigError,
        match=r"^veomni\.attn_implementation=eager: does not support Ulysses.* 2 .* to sdpa, or ulysses",
    ):
        module.registered["language_model"](module, group="two ranks", attention="eager")
    module.registered["language_model"](module, attention="eager")
