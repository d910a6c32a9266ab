"""Whether verl's platform fits the job, and whether Ray may give out as many CPUs as verl asks for.

That there are fewer GPUs than the job takes, verl says itself before it starts a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_checked, ok, warning, wrong

PLATFORM = "VERL_PLATFORM"
"""Environment variable that names verl's platform."""
CPU = "cpu"
CPUS_A_RANK = 3
"""``max_colocate_count`` of verl's ``ResourcePoolManager``."""


def choose_platform() -> str:
    """The platform that the environment names, or "". verl's own modules are then imported as for that one.

    A torch without accelerators can import them on the platform "cpu" only, so there it is set.
    """
    chosen = os.environ.get(PLATFORM, "").strip().lower()
    try:
        import torch
    except ImportError:  # reported as a version that is missing
        return chosen
    if not (torch.version.cuda or torch.version.hip or find_spec("torch_npu")):
        os.environ[PLATFORM] = CPU
    return chosen


def devices_of_job(config: DictConfig, platform: str) -> Iterator[Finding]:
    """The platform, and the CPUs that verl asks Ray for: where these are too few, the job waits for ever.

    Args:
        platform: the one that the environment names, "" for none.
    """
    device, named = config.trainer.device, platform or "not set"
    if (device == CPU) == (platform == CPU):
        yield ok(PLATFORM, named)
    elif device == CPU:
        yield wrong(PLATFORM, f"{named}, but trainer.device=cpu: verl looks for accelerators. export {PLATFORM}={CPU}")
    else:
        message = f"cpu, but trainer.device={device}: the job trains on the CPU. +local=cpu has settings for that."
        yield warning(PLATFORM, message)
    ranks, given = config.trainer.n_gpus_per_node, OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus")
    needed = CPUS_A_RANK * ranks + 1  # and one for the trainer's own process
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        yield not_checked("trainer.n_gpus_per_node", f"the devices are those of the Ray cluster {address}")
    elif config.trainer.nnodes == 1 and given is not None and given < needed:
        yield wrong(
            "ray_kwargs.ray_init.num_cpus",
            f"{given}: verl asks Ray for {needed}, and the job would wait for ever. They are tickets, not cores: raise "
            f"it, or lower trainer.n_gpus_per_node={ranks}.",
        )
