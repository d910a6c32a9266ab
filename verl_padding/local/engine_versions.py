"""Versions of the engines whose parts are replaced on a CPU, and settings that the replaced layers do not have."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from verl_padding.errors import PaddingConfigError

TRIED = {
    "megatron": {"megatron-core": "0.16.1", "mbridge": "0.15.1"},
    "veomni": {"veomni": "0.1.12"},
}
"""Strategy of a role -> package -> the version that ``verl_padding/local`` was written for."""
PLAIN = {
    "window_size": None,
    "softmax_type": "vanilla",
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "apply_query_key_layer_scaling": False,
    "fp8": None,
    "fp4": None,
}
"""Setting of Megatron's ``TransformerConfig`` -> what the layers of ``verl_padding/local/megatron`` have."""


def refuse_other_versions(strategy: str) -> None:
    """
    Raises:
        PaddingConfigError: a package of the engine is of a version that was not tried.
        PackageNotFoundError: it is not installed.
    """
    for package in TRIED.get(strategy, {}):
        refuse_other_version(strategy, package, version(package))


def refuse_other_version(strategy: str, package: str, found: str) -> None:
    """
    Args:
        found: the version that is installed, or that was imported.

    Raises:
        PaddingConfigError: it was not tried.
    """
    if found != (tried := TRIED[strategy][package]):
        raise PaddingConfigError(
            f"{package} {found}: on a CPU, parts of it are replaced by others that were written for {tried}. "
            f"Install that one: {command_for(package)}"
        )


def refuse_other_layers(name: str, value: Any, prefix: str = "") -> None:
    """
    Args:
        name: of a setting of Megatron's ``TransformerConfig``.
        prefix: of ``override_transformer_config``, where it is known.

    Raises:
        PaddingConfigError: the layers for a CPU would not follow it.
    """
    if name in PLAIN and (value or None) != ((plain := PLAIN[name]) or None):
        raise PaddingConfigError(
            f"{prefix}override_transformer_config.{name}={value}: on a CPU, Megatron's layers are replaced by others "
            f"that have {'null' if plain is None else plain} only. Set it to that, or train a model without it."
        )


def command_for(package: str) -> str:
    """What installs a package in the version that was tried.

    Without its dependencies, which the plug-in's extras have as far as an engine on a CPU needs them.
    """
    tried = {name: wanted for packages in TRIED.values() for name, wanted in packages.items()}
    return f"pip install --no-deps {package}=={tried[package]}"
