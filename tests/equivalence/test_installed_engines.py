"""An engine's package that is only installed changes nothing in a process before an engine is built."""

from importlib import import_module

import pytest
import torch
from verl.workers.engine import EngineRegistry

pytestmark = pytest.mark.slow


@pytest.mark.megatron
def test_nothing_of_torch_and_megatron_is_replaced_before_an_engine_is_built():
    from megatron.core.models.gpt import gpt_layer_specs

    import_module("verl.workers.engine.megatron.transformer_impl")
    assert "cpu" in EngineRegistry._engines["language_model"]["megatron"]
    assert torch.cuda.Stream.__module__.startswith("torch")
    assert torch.distributed.all_to_all_single.__module__.startswith("torch")
    assert not hasattr(torch.empty, "__wrapped__")  # which would keep its module
    assert not torch._dynamo.config.disable
    specs = getattr(gpt_layer_specs, "TESpecProvider", None)
    assert specs is None or specs.__module__.startswith("megatron.")


@pytest.mark.veomni
def test_nothing_of_verl_and_veomni_is_replaced_before_an_engine_is_built():
    module = import_module("verl.workers.engine.veomni.transformer_impl")
    assert "cpu" in EngineRegistry._engines["language_model"]["veomni"]
    assert module.MixedPrecisionConfig.__module__.startswith("veomni.")
    assert module.MixedPrecisionConfig().param_dtype != "float32"
