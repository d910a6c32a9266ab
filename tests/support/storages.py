"""TransferQueue's storages for a process of tests.

The code is its own; where a storage needs a service that is not here, a stand-in keeps the service's bytes in memory.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray
import transfer_queue.interface as tq_interface
from transfer_queue.client import TransferQueueClient
from transfer_queue.storage import simple_storage
from transfer_queue.storage.clients import mooncake_client, ray_storage_client, yuanrong_client
from transfer_queue.utils.zmq_utils import process_zmq_server_info

from verl_padding.pads.queue import controller

HAS_DISK = hasattr(simple_storage, "HybridStorageUnitData")
"""TransferQueue 0.1.10 has no SimpleStorage on disk."""


@dataclass
class Storage:
    """A storage that clients can be made for."""

    config: dict[str, Any]
    n_values: Callable[[], int]
    """How many values of rows lie in it: a field of a row is one."""
    actors: list[Any] = field(default_factory=list)


def start_simple_storage(_: pytest.MonkeyPatch, folder: Path, *, on_disk: bool = False) -> Storage:
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

    return Storage(config | {"zmq_info": process_zmq_server_info(units)}, n_values, list(units.values()))


def start_simple_storage_on_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Storage:
    return start_simple_storage(monkeypatch, folder, on_disk=True)


def start_ray_store(monkeypatch: pytest.MonkeyPatch, _: Path) -> Storage:
    """Its actor and its code; tensors go through Ray's store, since nixl, which takes them past it, is not here."""

    def put(value: Any, _tensor_transport: str | None = None) -> Any:
        return ray.put(value)

    monkeypatch.setattr(ray_storage_client, "ray", SimpleNamespace(**{**vars(ray), "put": put}))
    actor = ray_storage_client.RayStorageClient().storage_actor
    return Storage({}, lambda: ray.get(actor.__ray_call__.remote(lambda self: len(self.storage_dict))), [actor])


class MooncakeInMemory:
    """Mooncake's store in the memory of this process: it gets and gives bytes at addresses, and knows no shapes."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def setup(self, *_: Any) -> int:
        return 0

    register_buffer = unregister_buffer = setup

    def close(self) -> None:
        self.content.clear()

    def batch_upsert_from(self, keys: list[str], places: list[int], sizes: list[int], config: Any) -> list[int]:
        for key, place, size in zip(keys, places, sizes, strict=True):
            self.content[key] = ctypes.string_at(place, size)
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        for key, place, size in zip(keys, places, sizes, strict=True):
            assert len(self.content[key]) == size, f"{key}: {len(self.content[key])} bytes are there, not {size}"
            ctypes.memmove(place, self.content[key], size)
        return sizes

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if self.content.pop(key, None) is not None else -704 for key in keys]


def start_mooncake(monkeypatch: pytest.MonkeyPatch, _: Path) -> Storage:
    store = MooncakeInMemory()
    monkeypatch.setattr(mooncake_client, "MOONCAKE_STORE_IMPORTED", True)
    monkeypatch.setattr(mooncake_client, "MooncakeDistributedStore", lambda: store, raising=False)
    monkeypatch.setattr(mooncake_client, "ReplicateConfig", SimpleNamespace, raising=False)
    config = {"local_hostname": "here", "metadata_server": "here:1", "master_server_address": "here:2"}
    return Storage(config, lambda: len(store.content))


class YuanrongInMemory:
    """YuanRong's data system in the memory of this process: buffers by key."""

    def __init__(self) -> None:
        self.content: dict[str, bytearray] = {}

    def init(self) -> None:
        pass

    def mcreate(self, keys: list[str], sizes: list[int]) -> list[Any]:
        buffers = [bytearray(size) for size in sizes]
        return [
            SimpleNamespace(key=key, buffer=buffer, MutableData=lambda buffer=buffer: memoryview(buffer))
            for key, buffer in zip(keys, buffers, strict=True)
        ]

    def mset_buffer(self, made: list[Any]) -> None:
        self.content |= {each.key: each.buffer for each in made}

    def get_buffers(self, keys: list[str]) -> list[memoryview | None]:
        return [memoryview(self.content[key]) if key in self.content else None for key in keys]

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.content.pop(key, None)


def start_yuanrong(monkeypatch: pytest.MonkeyPatch, _: Path) -> Storage:
    system = YuanrongInMemory()
    monkeypatch.setattr(yuanrong_client, "YUANRONG_DATASYSTEM_IMPORTED", True)
    monkeypatch.setattr(
        yuanrong_client, "datasystem", SimpleNamespace(KVClient=lambda host, port: system), raising=False
    )
    monkeypatch.setattr(yuanrong_client, "find_reachable_host", lambda port: "here")
    return Storage({"worker_port": 1}, lambda: len(system.content))


STORAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch, Path], Storage]]] = {
    "SimpleStorage": ("SimpleStorage", start_simple_storage),
    "SimpleStorage on disk": ("SimpleStorage", start_simple_storage_on_disk),
    "RayStore": ("RayStore", start_ray_store),
    "MooncakeStore": ("MooncakeStore", start_mooncake),
    "Yuanrong": ("Yuanrong", start_yuanrong),
}
"""What a test knows a storage by -> TransferQueue's name of it, and what starts it."""


@contextmanager
def connected_to(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Storage]:
    """This process's TransferQueue with another storage behind the same controller."""
    backend, start = STORAGES[name]
    storage = start(monkeypatch, folder)
    config = ray.get(controller().get_config.remote())
    client = TransferQueueClient(client_id=f"client {uuid4().hex}", controller_info=config.controller.zmq_info)
    client.initialize_storage_manager(manager_type=backend, config=storage.config)
    monkeypatch.setattr(tq_interface, "_TQ_CLIENT", client)
    try:
        yield storage
    finally:
        client.close()
        for actor in storage.actors:
            ray.kill(actor)
