"""Whether this machine has the devices that a job asks for, and verl's platform fits the job."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, in_one_line, not_looked_at, ok, warning, wrong
from verl_padding.job.modes import COLOCATE_ASYNC, MODE_PREFIX, SEPARATE_ASYNC, SYNC
from verl_padding.job.roles_of_job import has_critic
from verl_padding.plan.counted import counted

PLATFORM = "VERL_PLATFORM"
"""Environment variable that names verl's platform."""
CPU = "cpu"
CPUS_A_RANK = 3
"""``max_colocate_count`` of verl's ``ResourcePoolManager``."""
ROLLOUT = "actor_rollout_ref.rollout"
TENSOR = "tensor_model_parallel_size"
PARALLEL_SIZES = (TENSOR, "data_parallel_size", "pipeline_model_parallel_size")
"""Of a rollout; a replica has as many ranks as their product."""
PREFILL, DECODE = "disaggregation.prefill_replicas", "disaggregation.decode_replicas"
DECODE_TENSOR = "disaggregation.decode_tensor_model_parallel_size"
"""Of a rollout that reads prompts and writes answers on ranks of their own."""
SHARDED = {"actor_rollout_ref.actor": "actor_rollout_ref.actor.fsdp_config", "critic": "critic.fsdp"}
"""Role -> section of its engine with the size of FSDP's groups."""
FSDP = ("fsdp", "fsdp2")
RAY_ADDRESS = "RAY_ADDRESS"
RAY_INIT = "ray_kwargs.ray_init"
SIZES = ("num_cpus", "num_gpus", "object_store_memory")
"""Settings of how large a Ray cluster is, which only a cluster of the job's own takes."""


def choose_platform() -> str:
    """The platform that the environment names, or "". verl's own modules are then imported as for that one.

    A torch without accelerators can import them on the platform "cpu" only, so there it is set.
    """
    chosen = os.environ.get(PLATFORM, "").strip().lower()
    if _accelerator() is None:
        os.environ[PLATFORM] = CPU
    return chosen


def platform_of_verl(platform: str) -> Iterator[Finding]:
    """Whether verl, with the modules that it was told to import, knows the platform that the environment names."""
    from verl.plugin.platform import PlatformRegistry

    if platform and PlatformRegistry.get(platform) is None:
        choices = ", ".join(PlatformRegistry.registered_names())
        yield wrong(PLATFORM, f"{platform}: verl knows no such platform. Choices: {choices}; or leave it out.")


def _accelerator() -> str | None:
    """The kind of accelerator that torch was built for."""
    try:
        import torch
    except ImportError:  # told as a version that is missing
        return None
    if torch.version.cuda or torch.version.hip:
        return "cuda"
    return "npu" if find_spec("torch_npu") else None


def devices_of_job(config: DictConfig, platform: str) -> Iterator[Finding]:
    """The platform, the Ray cluster if there is one, and the number of devices.

    Args:
        platform: the one that the environment names, "" for none.
    """
    device, cluster = config.trainer.device, ray_cluster(config)
    if (device == CPU) == (platform == CPU):
        yield ok(PLATFORM, platform or f"not set, for trainer.device={device}")
    elif device == CPU:
        yield wrong(
            PLATFORM,
            f"{platform or 'not set'}, but trainer.device=cpu: verl then looks for accelerators. "
            f"export {PLATFORM}={CPU}",
        )
    else:
        yield warning(
            PLATFORM, f"cpu, but trainer.device={device}: the job trains on the CPU. +local=cpu has settings for that."
        )
    yield from _replicas(config)
    yield from _tickets(config)
    yield from _shards(config)
    yield from _store(config)
    if cluster:
        yield from _on_cluster(config, cluster)
    elif platform != CPU and device != CPU:
        yield _number(config, device)
    else:
        yield from _tickets_of_ranks(config)


def ray_cluster(config: DictConfig) -> str | None:
    """The address of the Ray cluster that the job would join, as ``ray.init`` finds it."""
    from ray._private.utils import read_ray_address

    named = _own_address(config) or os.environ.get(RAY_ADDRESS)
    return None if named == "local" else named or read_ray_address()


def _own_address(config: DictConfig) -> str | None:
    """The address in the job's settings, which the environment does not change; None for what Ray looks for itself."""
    named = OmegaConf.select(config, f"{RAY_INIT}.address")
    return None if named in (None, "auto") else str(named)


def _on_cluster(config: DictConfig, address: str) -> Iterator[Finding]:
    setting = "trainer.n_gpus_per_node"
    yield not_looked_at(
        setting, f"{config.trainer.n_gpus_per_node}: the devices are those of the Ray cluster {address}"
    )
    sizes = {name: OmegaConf.select(config, f"{RAY_INIT}.{name}") for name in SIZES}
    given = {name: size for name, size in sizes.items() if size is not None}
    if given and os.environ.get(RAY_ADDRESS) and not _own_address(config):
        told = ", ".join(f"{RAY_INIT}.{name}={size}" for name, size in given.items())
        yield wrong(
            RAY_ADDRESS,
            f"{address}: the job joins this Ray cluster, and cannot say how large it is ({told}). unset {RAY_ADDRESS}, "
            "for a cluster of its own, or set these to null.",
        )
        return
    for name, size in given.items():
        yield wrong(
            f"{RAY_INIT}.{name}",
            f"{size}: a job that joins a Ray cluster ({address}) cannot say how large it is. Set it to null, or "
            f"{RAY_INIT}.address=local for a cluster of its own.",
        )


def _replicas(config: DictConfig) -> Iterator[Finding]:
    """Whether there are devices for one replica of each rollout that verl makes; without one it hangs, or ends."""
    sizes = _sizes_of_replica(config.actor_rollout_ref.rollout)
    replica = _ranks_of_replica(sizes)
    ranks, own = config.trainer.n_gpus_per_node * config.trainer.nnodes, _devices_of_rollout(config)
    largest = max(sizes, key=lambda name: sizes[name])
    others = [
        f"{ROLLOUT}.{name}={size}" for name, size in sizes.items() if name != largest and (size > 1 or "." in name)
    ]
    setting, told = f"{ROLLOUT}.{largest}", f"{sizes[largest]}" + "".join(f", with {other}" for other in others)
    if 0 < ranks < replica and _has_replicas_on_ranks(config):
        yield wrong(
            setting,
            f"{told}: a replica of the rollout takes {counted(replica, 'device')}, and the job has {ranks} "
            "(trainer.n_gpus_per_node x trainer.nnodes). Lower it, or raise trainer.n_gpus_per_node.",
        )
    elif ranks % (whole := math.prod(sizes[name] for name in PARALLEL_SIZES)) and _has_replicas_on_ranks(config):
        yield wrong(
            setting,
            f"{told}: verl's workers cut the {counted(ranks, 'rank')} of the trainer (trainer.n_gpus_per_node x "
            f"trainer.nnodes) into groups of {whole} for the rollout, which leaves some over. Choose sizes whose "
            f"product divides {ranks}.",
        )
    if 0 < own < replica:
        yield wrong(
            setting,
            f"{told}: a replica of the rollout takes {counted(replica, 'device')}, and there are {own} for those "
            f"beside the trainer ({ROLLOUT}.n_gpus_per_node x {ROLLOUT}.nnodes). Lower it, or raise "
            f"{ROLLOUT}.n_gpus_per_node.",
        )


def _sizes_of_replica(rollout: DictConfig) -> dict[str, int]:
    """Setting -> size, for all that says how many ranks a replica has."""
    sizes = {name: int(rollout.get(name) or 1) for name in PARALLEL_SIZES}
    apart = rollout.get("disaggregation")
    if apart and apart.get("enabled"):
        sizes |= {name: int(OmegaConf.select(rollout, name) or 1) for name in (PREFILL, DECODE)}
        sizes[DECODE_TENSOR] = int(OmegaConf.select(rollout, DECODE_TENSOR) or sizes[TENSOR])
    return sizes


def _ranks_of_replica(sizes: dict[str, int]) -> int:
    """As verl's ``LLMServerManager`` multiplies them."""
    if DECODE not in sizes:
        return math.prod(sizes.values())
    both = sizes[TENSOR] * sizes[PREFILL] + sizes[DECODE_TENSOR] * sizes[DECODE]
    return both * math.prod(sizes[name] for name in PARALLEL_SIZES if name != TENSOR)


def _has_replicas_on_ranks(config: DictConfig) -> bool:
    """Whether the trainer's ranks certainly have replicas of the rollout."""
    on_ranks_always = _mode(config) in (SYNC, COLOCATE_ASYNC)  # whatever the setting below says
    return on_ranks_always or bool(config.actor_rollout_ref.get("hybrid_engine", True))


def _tickets(config: DictConfig) -> Iterator[Finding]:
    """Whether Ray may give out as many CPUs as verl asks for; with fewer, a job waits for ever.

    That of a single node, which the job starts by itself: several nodes are a cluster that is there before the job.
    """
    setting, given = f"{RAY_INIT}.num_cpus", OmegaConf.select(config, f"{RAY_INIT}.num_cpus")
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    needed = CPUS_A_RANK * ranks + 1  # and one for the trainer's own process
    if given is not None and given < needed and config.trainer.nnodes == 1:
        yield wrong(
            setting,
            f"{given}: verl asks Ray for at least {needed} CPUs ({CPUS_A_RANK} for each of {counted(ranks, 'rank')}, "
            "and one), and the job would wait for ever. They are tickets, not cores. Raise it, leave it out, or lower "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}.",
        )


def _tickets_of_ranks(config: DictConfig) -> Iterator[Finding]:
    """Whether Ray, which finds no GPU on a CPU, is told of as many as verl asks it for.

    That of a single node, which the job starts by itself.
    """
    setting = f"{RAY_INIT}.num_gpus"
    given = OmegaConf.select(config, setting)
    if not given:
        yield wrong(setting, "null: Ray finds no GPU here, and verl asks it for one for each rank. Add +local=cpu.")
        return
    wanted = config.trainer.n_gpus_per_node * config.trainer.nnodes + _devices_of_rollout(config)
    if wanted > given and config.trainer.nnodes == 1:
        yield wrong(
            setting,
            f"{given}: verl asks Ray for {wanted}, one for each rank of the trainer and of a rollout of its own. "
            "Raise it: on a CPU they are tickets, not devices; or lower trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node}.",
        )


def _devices_of_rollout(config: DictConfig) -> int:
    """Devices of a rollout that has its own beside the trainer's."""
    rollout = config.actor_rollout_ref.rollout
    is_separate = _mode(config) == SEPARATE_ASYNC
    return int(rollout.nnodes or 0) * int(rollout.n_gpus_per_node or 0) if is_separate else 0


def _mode(config: DictConfig) -> str:
    """The trainer's, by verl's own name if it is one of verl's."""
    return str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX)


def _shards(config: DictConfig) -> Iterator[Finding]:
    """Whether FSDP's groups of ranks share out all ranks, as verl's engine takes it."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for role, section in SHARDED.items():
        size = OmegaConf.select(config, f"{section}.fsdp_size")
        is_trained = role != "critic" or has_critic(config)
        if not is_trained or OmegaConf.select(config, f"{role}.strategy") not in FSDP or not isinstance(size, int):
            continue
        if 0 <= size < ranks and (size == 0 or ranks % size):
            yield wrong(
                f"{section}.fsdp_size",
                f"{size}: does not divide the job's {ranks} ranks, of which verl makes groups of this size. Set it to "
                "a divisor, or to -1 for a group of all.",
            )


def _store(config: DictConfig) -> Iterator[Finding]:
    """Whether Ray would make a store of objects of the size that is asked for, in a cluster of the job's own."""
    from ray._private.services import determine_plasma_store_config

    setting = f"{RAY_INIT}.object_store_memory"
    given = OmegaConf.select(config, setting)
    if given is None or ray_cluster(config) or config.trainer.nnodes > 1:  # the store of other machines
        return
    place = OmegaConf.select(config, f"{RAY_INIT}._plasma_directory")
    try:
        determine_plasma_store_config(given, tempfile.gettempdir(), plasma_directory=place)
    except (ValueError, TypeError) as refusal:
        told = in_one_line(refusal)
        yield wrong(setting, f"{given}: Ray makes no such store of objects ({told}). Give bytes, or leave it out.")


def _number(config: DictConfig, device: str) -> Finding:
    import torch

    from verl_padding.entry.verl_refusals import n_gpus_of_pools

    trainer, setting = config.trainer, "trainer.n_gpus_per_node"
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
    there = torch.cuda.device_count() if device == "cuda" else torch.get_device_module(device).device_count()
    try:
        wanted = n_gpus_of_pools(config) + _devices_of_rollout(config)
    except Exception:  # told by verl's own checks
        return not_looked_at(setting, f"{trainer.n_gpus_per_node}: verl refuses the job")
    told = f"{trainer.n_gpus_per_node}: the job takes {counted(wanted, 'device')}"
    if there < wanted:
        return wrong(
            setting,
            f"{told}, all its pools together; this machine has {there}. Lower it, or name a Ray cluster "
            f"({RAY_ADDRESS}).",
        )
    return ok(setting, f"{told}, of {there}")
