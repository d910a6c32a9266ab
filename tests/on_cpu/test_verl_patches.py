"""verl runs on a CPU when asked to, whatever is imported first, and only then."""

from types import ModuleType

import torch

from tests.support.fresh_processes import run_fresh
from verl_padding.on_cpu.verl_patches import copy_on_sharded_save

SHOW = """
import sys
import verl
from verl.plugin.platform import PlatformRegistry
is_patched = "verl_padding.on_cpu.verl_patches" in sys.modules
print(int(is_patched), int("cpu" in PlatformRegistry.registered_names()))
"""

USE = """
import verl_padding.on_cpu.rollout.server
from verl.plugin.platform import get_platform
assert get_platform().device_name == "cpu"
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


def test_nothing_is_registered_unless_asked_for():
    assert run_fresh(SHOW, platform="nvidia").stdout.strip() == "0 0"


def test_every_piece_is_registered_whatever_is_imported_first():
    """verl itself comes first in each whole job."""
    result = run_fresh(USE, platform="cpu")
    assert result.returncode == 0, result.stderr


def test_a_saved_shard_is_a_copy():
    parameter = torch.ones(3)
    module = ModuleType("fsdp_utils")
    module.fsdp2_sharded_save_to_cpu = lambda model: (
        {"w": (parameter.detach().cpu(), "spec")},
        "global",
    )
    copy_on_sharded_save(module)

    shards, spec = module.fsdp2_sharded_save_to_cpu(None)
    parameter.zero_()

    assert shards["w"][0].tolist() == [1.0, 1.0, 1.0]
    assert (shards["w"][1], spec) == ("spec", "global")
