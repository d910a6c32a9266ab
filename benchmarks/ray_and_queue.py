"""A real Ray and a real TransferQueue, for a benchmark or a session of tests."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager

# Before anything imports verl: its platform is chosen once a process.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise it writes one into the home folder, which processes of tests that start at once take
# from each other.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Otherwise Ray starts a worker for each ticket, whether it is needed or not.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import verl_padding.on_cpu  # noqa: F401  (before anything imports transformers, and by it torchvision)


@contextmanager
def ray_and_queue(object_store_bytes=200_000_000, modules=""):
    """Starts both, and ends both; ``modules``: what verl imports in each worker
    (VERL_USE_EXTERNAL_MODULES)."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    folder = tempfile.mkdtemp(prefix="vp", dir="/tmp")  # Ray's sockets want a short path
    ray.init(
        # Tickets, not cores: verl asks for ten a rank, and for a GPU. Who gets none waits for ever,
        # and files that share workers hold theirs while others start more.
        num_cpus=512,
        num_gpus=48,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=object_store_bytes,
        runtime_env={"env_vars": {"VERL_USE_EXTERNAL_MODULES": modules} if modules else {}},
    )
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
