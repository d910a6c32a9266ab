"""verl's own vLLM replica on a CPU: the same server, with the worker extension that can load
weights there."""

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class CpuVllmServer(vLLMHttpServer):
    """verl's vLLM server, which names another worker extension."""

    def _get_worker_extension_cls(self) -> str:
        return "verl_padding.on_cpu.rollout.vllm_worker.CpuWorkerExtension"


class CpuVllmReplica(vLLMReplica):
    """verl's vLLM replica around a :class:`CpuVllmServer`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuVllmServer)
