"""verl's platform "cpu": what verl asks of an accelerator, answered by the host."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

PLATFORM = "cpu"


class _CpuDeviceModule(ModuleType):
    """``torch.cpu`` with the names of ``torch.cuda`` that verl uses; memory is the process's, in bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(device: object = None) -> int:
        return int(psutil.Process().memory_info().rss)

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        # The kernel updates the peak only now and then, so it may be below what is in use.
        return max(_peak_bytes(), int(psutil.Process().memory_info().rss))

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        with suppress(OSError):  # on Linux alone; elsewhere the peak stays that of the process
            Path("/proc/self/clear_refs").write_text("5")  # it is what is resident now (man 5 proc)

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return PLATFORM

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def nothing(*args: object, **kwargs: object) -> None:
        """For the caches and counters that a CPU does not have."""

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated
    manual_seed_all = manual_seed
    reset_max_memory_allocated = reset_peak_memory_stats
    empty_cache = ipc_collect = nothing


def _peak_bytes() -> int:
    """Most memory that the process has held since the peak was reset, in bytes."""
    with suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_DEVICE_MODULE = _CpuDeviceModule(f"{__name__}.device")


@PlatformRegistry.register(platform=PLATFORM)
class PlatformCPU(PlatformBase):
    """A CPU that presents itself to Ray as "GPU"; chosen by ``VERL_PLATFORM=cpu``.

    verl counts only "GPU" and "NPU" in Ray's resources, so a job on a CPU gives Ray as many logical GPUs
    as it has ranks (``ray_kwargs.ray_init.num_gpus``).
    """

    device_name = PLATFORM
    vendor_name = PLATFORM
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl passes it to Tensor.to, which takes an integer for the index of an accelerator
        return torch.device(PLATFORM)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        # For vLLM: it recognizes a CPU by the name of its own build, which a repackaged one need not have, and its
        # cache takes half of the machine's memory unless a size is set, in GiB.
        return super().rollout_env_vars() | {
            "VLLM_TARGET_DEVICE": PLATFORM,
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_NO_USAGE_STATS": "1",
        }

    def cudart(self) -> None:
        return None
