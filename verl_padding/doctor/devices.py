"""Whether this machine has the devices that a job asks for, and verl's platform fits the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_checked, ok, warning, wrong
from verl_padding.job.modes import MODE_PREFIX, SEPARATE_ASYNC
from verl_padding.plan.counted import counted

PLATFORM = "VERL_PLATFORM"
"""Environment variable that names verl's platform."""
CPU = "cpu"
RAY_ADDRESS = "RAY_ADDRESS"
RAY_INIT = "ray_kwargs.ray_init"
CPUS_A_RANK = 3
"""``max_colocate_count`` of verl's ``ResourcePoolManager``."""


def choose_platform() -> str:
    """The platform that the environment names, or "". verl's own modules are then imported as for that one.

    A torch without accelerators can import them on the platform "cpu" only, so there it is set.
    """
    chosen = os.environ.get(PLATFORM, "").strip().lower()
    if _accelerator() is None:
        os.environ[PLATFORM] = CPU
    return chosen


def _accelerator() -> str | None:
    """The kind of accelerator that torch was built for."""
    try:
        import torch
    except ImportError:  # reported as a version that is missing
        return None
    if torch.version.cuda or torch.version.hip:
        return "cuda"
    return "npu" if find_spec("torch_npu") else None


def devices_of_job(config: DictConfig, platform: str) -> Iterator[Finding]:
    """The platform, the tickets that verl asks Ray for, and the number of devices.

    Args:
        platform: the one that the environment names, "" for none.
    """
    device = config.trainer.device
    if (device == CPU) == (platform == CPU):
        yield ok(PLATFORM, platform or f"not set, for trainer.device={device}")
    elif device == CPU:
        yield wrong(
            PLATFORM,
            f"{platform or 'not set'}, but trainer.device=cpu: verl looks for accelerators. export {PLATFORM}={CPU}",
        )
    else:
        yield warning(
            PLATFORM, f"cpu, but trainer.device={device}: the job trains on the CPU. +local=cpu has settings for that."
        )
    address = OmegaConf.select(config, f"{RAY_INIT}.address") or os.environ.get(RAY_ADDRESS)
    if address and address != "local":
        yield not_checked("trainer.n_gpus_per_node", f"the devices are those of the Ray cluster {address}")
    elif config.trainer.nnodes > 1:
        yield not_checked("trainer.nnodes", f"{config.trainer.nnodes}: this is one of them")
    else:
        yield from _tickets(config)
        if platform != CPU and device != CPU:
            yield _number(config, device)


def _tickets(config: DictConfig) -> Iterator[Finding]:
    """Whether Ray may give out as many CPUs, and on a CPU devices, as verl asks for; else the job waits for ever."""
    ranks = config.trainer.n_gpus_per_node
    asked = {"num_cpus": CPUS_A_RANK * ranks + 1}  # and one for the trainer's own process
    if config.trainer.device == CPU:
        asked["num_gpus"] = ranks + _devices_of_rollout(config)
    for name, needed in asked.items():
        setting = f"{RAY_INIT}.{name}"
        given = OmegaConf.select(config, setting)
        if given is None and name == "num_gpus":
            yield wrong(setting, "null: Ray finds no GPU here, and verl asks it for one for each rank. Add +local=cpu.")
        elif given is not None and given < needed:
            yield wrong(
                setting,
                f"{given}: verl asks Ray for {needed}, and the job would wait for ever. They are tickets, not cores or "
                f"devices: raise it, or lower trainer.n_gpus_per_node={ranks}.",
            )


def _devices_of_rollout(config: DictConfig) -> int:
    """Devices of a rollout that has its own beside the trainer's."""
    if str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX) != SEPARATE_ASYNC:
        return 0
    rollout = config.actor_rollout_ref.rollout
    return int(rollout.nnodes or 0) * int(rollout.n_gpus_per_node or 0)


def _number(config: DictConfig, device: str) -> Finding:
    import torch

    from verl_padding.entry.verl_refusals import n_gpus_of_pools

    setting = "trainer.n_gpus_per_node"
    if _accelerator() != device:
        return wrong(
            "trainer.device",
            f"{device}: torch {torch.__version__} was not built for it. Install a torch that was, or train on this "
            f"machine's CPU: {PLATFORM}={CPU} and +local=cpu.",
        )
    there = torch.cuda.device_count() if device == "cuda" else torch.get_device_module(device).device_count()
    try:
        wanted = n_gpus_of_pools(config) + _devices_of_rollout(config)
    except Exception:  # reported by verl's own checks
        return not_checked(setting, f"{config.trainer.n_gpus_per_node}: verl refuses the job")
    message = f"{config.trainer.n_gpus_per_node}: the job takes {counted(wanted, 'device')}, of {there}"
    if there < wanted:
        return wrong(setting, f"{message}. Lower it, or name a Ray cluster ({RAY_ADDRESS}).")
    return ok(setting, message)
