"""Whether this machine has the devices that a job asks for, and verl's platform fits the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, warning, wrong
from verl_padding.plan.counted import counted
from verl_padding.verl_job.modes import MODE_PREFIX, SEPARATE_ASYNC

PLATFORM = "VERL_PLATFORM"
"""Environment variable that names verl's platform."""
CPU = "cpu"
RAY_ADDRESS = "RAY_ADDRESS"


def choose_platform() -> str:
    """The platform that the environment names, or "". verl's own modules are then imported as for that one.

    A torch without accelerators can import them on the platform "cpu" only, so there it is set.
    """
    chosen = os.environ.get(PLATFORM, "").strip().lower()
    if not chosen and _accelerator() is None:
        os.environ[PLATFORM] = CPU
    return chosen


def _accelerator() -> str | None:
    """The kind of accelerator that torch was built for."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "cuda"
    return "npu" if find_spec("torch_npu") else None


def devices_of_job(config: DictConfig, platform: str) -> Iterator[Finding]:
    """The platform, and the number of devices.

    Args:
        platform: the one that the environment names, "" for none.
    """
    device = config.trainer.device
    if device == CPU:
        if platform == CPU:
            yield ok(PLATFORM, platform)
        else:
            yield wrong(
                PLATFORM,
                f"{platform or 'not set'}, but trainer.device=cpu: verl then looks for accelerators. "
                f"export {PLATFORM}={CPU}",
            )
        return
    if platform == CPU:
        yield warning(
            PLATFORM, f"cpu, but trainer.device={device}: the job trains on the CPU. +local=cpu has settings for that."
        )
        return
    yield _number(config, device)


def _number(config: DictConfig, device: str) -> Finding:
    import torch

    trainer, setting = config.trainer, "trainer.n_gpus_per_node"
    address = os.environ.get(RAY_ADDRESS) or OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if address:
        return not_looked_at(setting, f"{trainer.n_gpus_per_node}: the devices are those of the Ray cluster {address}")
    if trainer.nnodes > 1:
        return not_looked_at(
            setting, f"{trainer.n_gpus_per_node}: the job is for {counted(trainer.nnodes, 'node')}, and this is one"
        )
    if _accelerator() != device:
        return wrong(
            "trainer.device",
            f"{device}: torch {torch.__version__} was not built for it. Install a torch that was, or train on this "
            f"machine's CPU: {PLATFORM}={CPU} and +local=cpu.",
        )
    wanted = int(trainer.n_gpus_per_node)
    told = f"{wanted}"
    if trainer.v1.trainer_mode.removeprefix(MODE_PREFIX) == SEPARATE_ASYNC:
        rollout = config.actor_rollout_ref.rollout
        more = int(rollout.nnodes or 0) * int(rollout.n_gpus_per_node or 0)
        wanted, told = wanted + more, f"{wanted}, and {more} of the rollout"
    there = torch.cuda.device_count() if device == "cuda" else torch.get_device_module(device).device_count()
    if there < wanted:
        return wrong(
            setting,
            f"{told}: this machine has {counted(there, 'device')}. Lower it, or name the Ray cluster ({RAY_ADDRESS}).",
        )
    return ok(setting, f"{told}, of {there}")
