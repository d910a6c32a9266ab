"""Environment variables with values that verl or Ray refuse: of the shell, and those that the job's config adds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.devices import RAY_INIT, ray_cluster
from verl_padding.doctor.finding import SHOWN, Finding, warning, wrong
from verl_padding.doctor.named_objects import is_module
from verl_padding.job.modes import SEPARATE_ASYNC

ENV_VARS = f"{RAY_INIT}.runtime_env.env_vars"
"""Setting of what the job's workers get beside the environment of their node."""
LEVEL = "VERL_LOGGING_LEVEL"


def _refuse_without_modelscope(text: str) -> None:
    if text.lower() == "true" and not is_module("modelscope"):
        raise ValueError


PARSED: dict[str, tuple[str, Callable[[str], object]]] = {
    LEVEL: ("a level of Python's logging (DEBUG, INFO ..)", lambda text: logging.Logger("").setLevel(text)),
    "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": ("a whole number", int),
    "VERL_USE_MODELSCOPE": ("the package modelscope", _refuse_without_modelscope),
}
"""Variable that verl reads as its modules are imported -> what it has to be, and what verl does with it."""
OF_RAY = "RAY_"
TEXTS_OF_RAY = (
    "RAY_ADDRESS",
    "RAY_TMPDIR",
    "RAY_AUTH_",
    "RAY_CLUSTER_",
    "RAY_IP",
    "RAY_JOB_",
    "RAY_NAMESPACE",
    "RAY_NODE_",
    "RAY_RUNTIME_ENV",
)
"""Beginnings of Ray's variables that may have any value."""
SHARES_OF_RAY = ("RAY_memory_usage_threshold",)
"""What Ray's node asserts to be a number from 0 to 1."""
READ_AS_WORDS = ("CUDA_", "GLOO_", "HF_", "NCCL_", "OMP_", "RAY_", "TOKENIZERS_", "TRANSFORMERS_", "VERL_")
"""Beginnings of variables whose values are numbers, flags and names, of which quotes are never a part."""


def environment_of_job(config: DictConfig) -> dict[str, str]:
    """What the job's workers have on this machine, if it starts its Ray itself."""
    return {**os.environ, **_added(config)}


def _added(config: DictConfig) -> dict[str, str]:
    added = OmegaConf.select(config, ENV_VARS)
    return {str(name): str(value) for name, value in added.items()} if isinstance(added, DictConfig) else {}


def variables_of_shell() -> Iterator[Finding]:
    """Those with which verl or Ray cannot be imported; what is looked at later does without them."""
    for refused in _refused(os.environ, os.environ):
        del os.environ[refused.subject]
        yield refused
    yield from _quoted(os.environ)


def variables_of_job(config: DictConfig) -> Iterator[Finding]:
    """The same of the variables that the job's config adds, and what Ray's own processes refuse."""
    added = _added(config)
    for found in chain(_refused(added, environment_of_job(config)), _quoted(added)):
        yield replace(found, subject=f"{ENV_VARS}.{found.subject}")
    yield from _level_that_ends_verl(config)
    if not ray_cluster(config):
        for name in SHARES_OF_RAY:
            if name in os.environ and not _is_share(os.environ[name]):
                yield wrong(name, f"{os.environ[name]}: Ray's node ends with it as it starts. Set it from 0 to 1.")


def _level_that_ends_verl(config: DictConfig) -> Iterator[Finding]:
    """verl 0.9.1 logs a line with ``flush=True``, which Python's loggers do not take; padded trainers leave it out."""
    if config.trainer.v1.trainer_mode != SEPARATE_ASYNC or config.get("padding") is not None:
        return
    level = environment_of_job(config).get(LEVEL, "INFO")
    if not config.actor_rollout_ref.get("hybrid_engine", True) and _number_of(level) <= logging.INFO:
        yield wrong(
            LEVEL,
            f"{level}: with actor_rollout_ref.hybrid_engine=False, verl's trainer ends with an error in a line of its "
            "own log, once its workers run. Set it to WARN.",
        )


def _number_of(level: str) -> int:
    return logging.getLevelNamesMapping().get(level, logging.WARNING)


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _quoted(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in variables.items():
        bare = value.strip("'\"")
        if name.startswith(READ_AS_WORDS) and bare and len(value) > len(bare) and value[:1] == value[-1:]:
            yield warning(
                name, f"{value}: its quotes are a part of the value, and nobody takes them off. Set it to {bare}."
            )


def _refused(variables: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """
    Args:
        variables: those that are looked at, a part of the environment.
    """
    for name, (needed, parse) in PARSED.items():
        value = variables.get(name)
        if value is None:
            continue
        try:
            parse(value)
        except ValueError:
            meant = f" Set it to {value.upper()}." if _is_level(name, value.upper()) else ""
            yield wrong(name, f"{value}: {needed} is needed, and importing verl ends with an error.{meant}")
    of_ray = [name for name, value in variables.items() if name.startswith(OF_RAY) and not value.isdigit()]
    of_ray = [name for name in of_ray if not name.startswith(TEXTS_OF_RAY)]
    others = {name: value for name, value in environment.items() if name not in of_ray}
    if of_ray and _end_of_ray(environment) is not None and _end_of_ray(others) is None:
        for name in of_ray:
            if (ended := _end_of_ray({**others, name: variables[name]})) is not None:
                yield wrong(name, f"{variables[name]}: importing Ray ends with it ({ended}). Correct it, or unset it.")


def _is_level(name: str, text: str) -> bool:
    return name == LEVEL and text in logging.getLevelNamesMapping()


def _end_of_ray(environment: Mapping[str, str]) -> str | None:
    """How a process ends that imports Ray, None if all is well: Ray's own library aborts where it reads no number."""
    command = [sys.executable, "-c", "import ray"]
    ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()
    return said[-1][:SHOWN] if said else f"exit code {ended.returncode}"
