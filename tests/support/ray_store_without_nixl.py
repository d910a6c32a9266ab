"""TransferQueue's RayStore where nixl is not: its tensors go through Ray's own store.

Loaded by verl in each process of a job (VERL_USE_EXTERNAL_MODULES).
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wrapt import register_post_import_hook

NOTE = "ray_store"
"""File in the folder of a job's probe: it is there once a tensor has been stored."""


def put_without_transport(module: Any) -> None:
    """Leaves out what tells Ray to take a tensor past its store."""
    ray = module.ray

    def put(value: Any, _tensor_transport: str | None = None) -> Any:
        if _tensor_transport and (folder := os.environ.get("VERL_PADDING_PROBE")):
            (Path(folder) / NOTE).touch()
        return ray.put(value)

    module.ray = SimpleNamespace(**{**vars(ray), "put": put})


register_post_import_hook(put_without_transport, "transfer_queue.storage.clients.ray_storage_client")
