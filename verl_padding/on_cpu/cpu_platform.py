"""verl's platform "cpu": what verl asks of an accelerator, answered by the host."""

import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

PLATFORM = "cpu"


def _always(answer: Any) -> Any:
    return staticmethod(lambda *_, **__: answer)


class _CpuDeviceModule(ModuleType):
    """``torch.cpu`` with the names of ``torch.cuda`` that verl uses. It has no memory of a device:
    verl logs the host's by itself."""

    memory_allocated = memory_reserved = _always(0)
    max_memory_allocated = max_memory_reserved = _always(0)
    mem_get_info = _always((0, 0))
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    get_device_name = _always(PLATFORM)
    empty_cache = ipc_collect = reset_peak_memory_stats = _always(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform=PLATFORM)
class PlatformCPU(PlatformBase):
    """A CPU, chosen by ``VERL_PLATFORM=cpu``.

    verl counts only "GPU" and "NPU" in Ray's resources, so a job on a CPU gives Ray as many logical
    GPUs as it has ranks (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = vendor_name = PLATFORM
    device_module = _CpuDeviceModule(f"{__name__}.device")
    is_available = _always(True)
    is_ipc_supported = _always(False)
    # verl passes it to Tensor.to, which takes an index for a GPU's
    current_device = _always(torch.device(PLATFORM))
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always([])
    nvtx_range = staticmethod(nullcontext)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    # nothing to do on a CPU
    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)

    def rollout_env_vars(self) -> dict[str, str]:
        # For vLLM: it recognizes a CPU by the name of its own build, which a repackaged one need
        # not have, and its cache takes half of the machine's memory unless a size is set, in GiB.
        return super().rollout_env_vars() | {
            "VLLM_TARGET_DEVICE": PLATFORM,
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_NO_USAGE_STATS": "1",
        }
