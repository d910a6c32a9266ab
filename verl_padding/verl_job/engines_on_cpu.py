"""verl's engines that run on a CPU with parts replaced: the versions that the parts fit, and settings they do not."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from verl_padding.errors import PaddingConfigError

TRIED = {
    "megatron": {"megatron-core": "0.16.1", "mbridge": "0.15.1"},
    "veomni": {"veomni": "0.1.12"},
}
"""Strategy of a role -> package -> the version that ``verl_padding/local`` was written for."""


def refuse_other_versions(strategy: str) -> None:
    """
    Raises:
        PaddingConfigError: a package of the engine is of a version that was not tried.
        PackageNotFoundError: it is not installed.
    """
    for package, tried in TRIED.get(strategy, {}).items():
        if (installed := version(package)) != tried:
            raise PaddingConfigError(
                f"{package} {installed}: on a CPU, parts of it are replaced by others that were written for {tried}. "
                f"Install that one: {command_for(package)}"
            )


def refuse_megatron_bridge(section: str, config: Any) -> None:
    """
    Args:
        section: of the role.
        config: verl's ``McoreEngineConfig``.

    Raises:
        PaddingConfigError: the engine asks for Megatron-Bridge.
    """
    if not config.vanilla_mbridge:
        raise PaddingConfigError(
            f"{section}.megatron.vanilla_mbridge=False: on a CPU, Megatron needs the vanilla bridge; Megatron-Bridge "
            "imports Transformer Engine, which needs CUDA. Set it to True, as +local=cpu_megatron does."
        )


def command_for(package: str) -> str:
    """What installs a package in the version that was tried.

    Without its dependencies, which the plug-in's extras have as far as an engine on a CPU needs them.
    """
    tried = {name: wanted for packages in TRIED.values() for name, wanted in packages.items()}
    return f"pip install --no-deps {package}=={tried[package]}"
