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


def test_nothing_is_registered_unless_asked_for():
    assert run_fresh(SHOW, platform="nvidia").stdout.strip() == "0 0"


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
