"""The network interfaces that gloo and NCCL are told to use by the environment of a job's workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl_padding.doctor.devices import ray_cluster
from verl_padding.doctor.environment import environment_of_job
from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interfaces_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether this machine has them, where the job's ranks are on this machine alone."""
    environment = environment_of_job(config)
    # Every group of ranks has one of gloo; torch takes no name of one letter.
    variables = (GLOO, NCCL) if config.trainer.device == "cuda" else (GLOO,)
    named = {variable: environment[variable] for variable in variables if len(environment.get(variable, "")) > 1}
    if named and (ray_cluster(config) or config.trainer.nnodes > 1):
        for variable, value in named.items():
            yield not_looked_at(variable, f"{value}: the interfaces are those of the nodes of a Ray cluster")
        return
    there = [name for _, name in socket.if_nameindex()]
    has = f"this machine has {', '.join(there)}"
    for variable, value in named.items():
        missing = _missing_to_gloo(value, there) if variable == GLOO else _missing_to_nccl(value, there)
        if missing:
            yield wrong(variable, f"{value}: there is no network interface {missing}; {has}. Correct or unset it.")
        else:
            yield ok(variable, value)


def _missing_to_gloo(named: str, there: Sequence[str]) -> str:
    """The first that is not there; torch takes all of them."""
    wanted = [name.partition(":")[0] for name in named.split(",")]  # a label of an address of its own follows a colon
    return next((name for name in wanted if name and name not in there), "")


def _missing_to_nccl(named: str, there: Sequence[str]) -> str:
    """What is meant, if nothing is: beginnings of names, whole names behind ``=``, and behind ``^`` all others."""
    excludes, bare = named.startswith("^"), named.removeprefix("^")
    exact, bare = bare.startswith("="), bare.removeprefix("=")
    wanted = [name.partition(":")[0] for name in bare.split(",") if name]

    def is_named(name: str) -> bool:
        return any(name == each if exact else name.startswith(each) for each in wanted)

    return "" if any(is_named(name) != excludes for name in there) else named
