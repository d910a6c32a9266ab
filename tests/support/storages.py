"""TransferQueue's storages that verl's jobs can use, for a process of tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import transfer_queue.interface as tq_interface
from transfer_queue.client import TransferQueueClient
from transfer_queue.storage import simple_storage
from transfer_queue.utils.zmq_utils import process_zmq_server_info

from verl_padding.pads.queue import controller

HAS_DISK = hasattr(
    simple_storage, "HybridStorageUnitData"
)  # TransferQueue 0.1.10 has no SimpleStorage on disk


@dataclass
class Storage:
    """A storage that clients can be made for."""

    config: dict[str, Any]
    n_values: Callable[[], int]  # how many values of rows lie in it: a field of a row is one
    actors: list[Any]


def start_simple_storage(folder: Path, *, on_disk: bool = False) -> Storage:
    """Two units of their own; on disk, one, where every value is, where there is such a storage."""
    if on_disk and not HAS_DISK:
        pytest.skip("this TransferQueue has no SimpleStorage on disk")
    config: dict[str, Any] = {"num_data_storage_units": 1 if on_disk else 2}
    if on_disk:
        folder.mkdir(exist_ok=True)
        config["ssd_offload"] = {"enabled": True, "path": str(folder), "threshold_bytes": 1}
    units = {
        f"unit{number} {uuid4().hex}": simple_storage.SimpleStorageUnit.remote(
            **({"config": config} if HAS_DISK else {})
        )
        for number in range(config["num_data_storage_units"])
    }

    def n_values() -> int:
        return len([path for path in folder.rglob("*") if path.is_file()]) if on_disk else 0

    return Storage(
        config | {"zmq_info": process_zmq_server_info(units)}, n_values, list(units.values())
    )


STORAGES: dict[str, Callable[[Path], Storage]] = {
    "in memory": start_simple_storage,
    "on disk": partial(start_simple_storage, on_disk=True),
}


@contextmanager
def connected_to(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Storage]:
    """This process's TransferQueue with another storage behind the same controller."""
    storage = STORAGES[name](folder)
    config = ray.get(controller().get_config.remote())
    client = TransferQueueClient(
        client_id=f"client {uuid4().hex}", controller_info=config.controller.zmq_info
    )
    client.initialize_storage_manager(manager_type="SimpleStorage", config=storage.config)
    monkeypatch.setattr(tq_interface, "_TQ_CLIENT", client)
    try:
        yield storage
    finally:
        client.close()
        for actor in storage.actors:
            ray.kill(actor)
