"""What tests of several folders share: one Ray and one TransferQueue a test session."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before anything imports verl: its platform is chosen once a process.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """A real TransferQueue on a real Ray, started once and shut down at the end."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    # Ray puts unix sockets there, whose paths may not be longer than about 100 characters.
    folder = tempfile.mkdtemp(prefix="vp", dir="/tmp")
    ray.init(
        num_cpus=32,  # tickets, not cores: verl asks for three a worker, and for a GPU
        num_gpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=200_000_000,
    )
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
