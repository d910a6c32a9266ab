"""An engine's package that is only installed changes nothing: not the process, and not what FSDP2 computes."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.engine import EngineRegistry

from tests.equivalence.updates import ALL_TERMS, LENGTHS, call, with_trained_fields
from tests.support import hidden_engines
from tests.support.fsdp2_workers import start_actor, stop, weights_of
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

PACKAGES = {name: pytest.param(name, marks=getattr(pytest.mark, name), id=name) for name in ("megatron", "veomni")}
"""Package, which is also the name of its engine."""
ROWS = 8


def updated_weights(model: Path, package: str, *, hidden: bool) -> torch.Tensor:
    """The weights of two FSDP2 ranks after an update, in processes that find the package or do not."""
    environment = {"VERL_USE_EXTERNAL_MODULES": hidden_engines.__name__, hidden_engines.HIDDEN: package}
    ranks = start_actor(model, 2, *ALL_TERMS, environment=environment if hidden else None)
    ranks.execute_with_func_generator(assert_has_engine(package, has=not hidden))
    try:
        return _weights_after_an_update(ranks)
    finally:
        stop(ranks)


def assert_has_engine(package: str, *, has: bool) -> Any:
    def check(worker: Any) -> DataProto:
        engines = EngineRegistry._engines["language_model"]
        assert (package in engines) == has, sorted(engines)
        return DataProto()

    return check


def _weights_after_an_update(ranks: RayWorkerGroup) -> torch.Tensor:
    torch.manual_seed(0)
    batch = with_trained_fields(put_rows(LENGTHS[:ROWS]))
    before = weights_of(ranks)
    ranks.update_actor(call(batch, batch.keys, global_batch_size=ROWS, mini_batch_size=ROWS, epochs=2))
    after = weights_of(ranks)
    assert (after - before).norm() > 0.1
    tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
    return after


@pytest.mark.parametrize("package", PACKAGES.values())
def test_an_update_of_fsdp2_ranks_is_the_same_to_the_last_bit_without_it(package, qwen2):
    pytest.importorskip(package)
    with_it, without = (updated_weights(qwen2, package, hidden=hidden) for hidden in (False, True))
    assert torch.equal(with_it, without)


@pytest.mark.parametrize("package", [PACKAGES["megatron"]])
def test_nothing_of_torch_and_megatron_is_replaced_before_an_engine_is_built(package):
    pytest.importorskip(package)
    from megatron.core.models.gpt import gpt_layer_specs

    import_module("verl.workers.engine.megatron.transformer_impl")
    assert "cpu" in EngineRegistry._engines["language_model"]["megatron"]
    assert torch.cuda.Stream.__module__.startswith("torch")
    assert torch.distributed.all_to_all_single.__module__.startswith("torch")
    assert not hasattr(torch.empty, "__wrapped__")  # which would keep its module
    assert not torch._dynamo.config.disable
    specs = getattr(gpt_layer_specs, "TESpecProvider", None)
    assert specs is None or specs.__module__.startswith("megatron.")


@pytest.mark.parametrize("package", [PACKAGES["veomni"]])
def test_nothing_of_verl_and_veomni_is_replaced_before_an_engine_is_built(package):
    module = pytest.importorskip(package) and import_module("verl.workers.engine.veomni.transformer_impl")
    assert "cpu" in EngineRegistry._engines["language_model"]["veomni"]
    assert module.MixedPrecisionConfig.__module__.startswith("veomni.")
    assert module.MixedPrecisionConfig().param_dtype != "float32"
