"""Checkpoint engine of separate_async on one node: the weights travel through a file."""

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_POLL_S = 0.02


@CheckpointEngineRegistry.register("shared_file")
class SharedFileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer, the master, writes all weights into one file, and every rollout worker
    reads it.

    A file lives for one synchronisation, in the temporary folder (``TMPDIR``), which all of them
    must share.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {
            "file": str(Path(tempfile.gettempdir(), f"verl_weights_{uuid.uuid4().hex}.safetensors"))
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        file = metadata[0]["file"]  # the trainer's rank 0 comes first
        return {"file": [file] * actor_wg_world_size}, {"file": [file] * rollout_world_size}

    def init_process_group(self, file: str) -> None:
        self._file = Path(file)

    def finalize(self) -> None:
        if self._is_master:
            self._file.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Writes the file; every rank must call it: to gather is a collective."""
        tensors = {}
        for name, tensor in weights:
            if self._is_master:
                # a copy: the generator may hand out views of buffers that it uses again
                tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if self._is_master:
            partial = self._file.with_suffix(".partial")
            save_file(tensors, partial)
            partial.rename(self._file)  # at once, so that no reader finds half a file

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, weight) once the file is there; a trainer that fails before ends the
        job."""
        # Nobody tells the readers: they look for the file until it is there.
        while not self._file.exists():
            await asyncio.sleep(_POLL_S)
        for name, tensor in load_file(self._file).items():
            yield name, tensor
