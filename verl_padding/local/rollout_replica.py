"""The two ends of the transformers rollout that verl holds: the replica (driver) and the adapter (worker)."""

import os
from collections.abc import Iterable
from math import prod
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from verl_padding.local.verl_patches import ROLLOUT_NAME


def _server_name(replica_rank: int) -> str:
    return f"{ROLLOUT_NAME}_server_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """Starts one `TransformersServer`, whatever the replica's world size: a small model is not split on a CPU."""

    async def launch_servers(self) -> None:
        from verl_padding.local.rollout_server import TransformersServer

        server = (
            ray.remote(TransformersServer)
            .options(name=_server_name(self.replica_rank), max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(self.config, self.model_config)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = _server_name(self.replica_rank)  # where others have one
        await server.__ray_ready__.remote()


class TransformersAdapter(BaseRollout):
    """Hands the weights to the replica's server: the first of its workers does, the others take part in gathering.

    It lives in the trainer's worker (hybrid) or in a worker of its own (standalone).
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        size = prod(getattr(self.config, name) for name in sizes)
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server has its memory back as soon as weights arrive."""

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._server().sleep.remote()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Sends (name, full tensor) pairs to the server; all workers of the replica must call it."""
        from verl.workers.rollout.utils import ensure_async_iterator

        tensors = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                # a copy: on a CPU the gathered tensor may be the live parameter itself
                tensors[name] = tensor.detach().to("cpu", copy=True)
        if self.is_leader_rank:
            await self._server().load_weights.remote(tensors, global_steps)

    def _server(self) -> Any:
        return ray.get_actor(_server_name(self.replica_rank))
