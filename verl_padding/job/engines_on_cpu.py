"""verl's engines that run on a CPU with parts replaced: the versions that the parts fit, and settings they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.model_cost import ropes_of
from verl_padding.plan.transformer_cost import sliding_layers

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


def refuse_megatron_on_a_cpu(section: str, model_section: str, config: Any) -> None:
    """
    Args:
        section: of the role.
        model_section: of its model.
        config: verl's ``McoreEngineConfig``.

    Raises:
        PaddingConfigError: the engine asks for what Megatron does not have on a CPU.
    """
    if not config.vanilla_mbridge:
        raise PaddingConfigError(
            f"{section}.megatron.vanilla_mbridge=False: on a CPU, Megatron needs the vanilla bridge; Megatron-Bridge "
            "imports Transformer Engine, which needs CUDA. Set it to True, as +local=cpu_megatron does."
        )
    if not config.use_remove_padding:
        raise PaddingConfigError(
            f"{model_section}.use_remove_padding=False: on a CPU, Megatron's attention is one of packed rows, and "
            "takes a mask for its opposite. Set it to True."
        )
    if config.use_fused_kernels:
        raise PaddingConfigError(
            f"{model_section}.use_fused_kernels=True: on a CPU, verl's fused kernel for Megatron does not run, "
            "whatever fused_kernel_options says. Set it to False."
        )
    if config.dynamic_context_parallel:
        raise PaddingConfigError(
            f"{section}.megatron.dynamic_context_parallel=True: on a CPU, Megatron-Core is "
            f"{TRIED['megatron']['megatron-core']}, which has no scheduler for it. Set it to False."
        )
    cut = int(config.expert_tensor_parallel_size or config.tensor_model_parallel_size)
    if config.expert_model_parallel_size > 1 and cut > 1:
        raise PaddingConfigError(
            f"{section}.megatron.expert_tensor_parallel_size={config.expert_tensor_parallel_size}: on a CPU, gloo does "
            f"not gather tokens for experts that are dealt out (expert_model_parallel_size="
            f"{config.expert_model_parallel_size}) and cut into {cut}, too. Set it to 1."
        )
    if config.param_offload:
        raise PaddingConfigError(
            f"{section}.megatron.param_offload=True: on a CPU, there is no device for which memory could be pinned. "
            "Set it to False."
        )
    if config.dist_ckpt_optim_fully_reshardable:
        raise PaddingConfigError(
            f"{section}.megatron.dist_ckpt_optim_fully_reshardable=True: on a CPU, Megatron-Core could not load the "
            "optimizer of such a checkpoint, since its ranks pass it on by CUDA. Set it to False."
        )
    for name, value in (config.override_transformer_config or {}).items():
        refuse_other_layers(name, value, f"{section}.megatron.")


def refuse_model_of_megatron_on_a_cpu(named: str, model: Mapping[str, Any], override: Mapping[str, Any]) -> None:
    """
    Args:
        named: the setting of the model's path, with its value.
        model: its Hugging Face config.
        override: the job's ``override_transformer_config``.

    Raises:
        PaddingConfigError: Megatron would compute it without a part, or not at all.
    """
    if other := next(_not_plain(model, override), None):
        raise PaddingConfigError(
            f"{named}: on a CPU, Megatron's bridge and layers know plain rotary embeddings and plain attention of text "
            f"models, and this one has {other}. Choose another model, or another engine."
        )


def _not_plain(model: Mapping[str, Any], override: Mapping[str, Any]) -> Iterator[str]:
    """What the vanilla bridge leaves out without a word where transformers is 5, and the layers for a CPU lack."""
    if model.get("vision_config"):
        yield "a vision tower"
    ropes = ropes_of(model)
    for rope in ropes:
        if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
            yield f"rope_type={kind!r}"
    if len(ropes) > 1:
        yield "rotary embeddings for each kind of layer"
    for of_model in (*ropes, model):
        if (part := of_model.get("partial_rotary_factor") or 1) != 1:
            yield f"partial_rotary_factor={part}"
    if sliding_layers(model):
        yield f"sliding_window={model['sliding_window']}"
    if rank := model.get("kv_lora_rank"):
        yield f"kv_lora_rank={rank}"
    if "attention_dropout" not in override and (dropout := model.get("attention_dropout")):
        yield f"attention_dropout={dropout}"


def refuse_memory_of_a_device(section: str, config: DictConfig, *, copies_weights: bool) -> None:
    """
    Args:
        section: of a role that trains on a CPU by Megatron.
        config: of the job.
        copies_weights: whether the job's trainer keeps earlier weights of the role.

    Raises:
        PaddingConfigError: what the job asks for would move something between a device and the host's memory.
    """
    if copies_weights:
        trainer_mode = config.trainer.v1.trainer_mode
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode}: on a CPU, there is no device for which memory could be pinned, "
            "where verl keeps Megatron's weights for the old log-probs. Set "
            "algorithm.rollout_correction.bypass_mode=True, or take FSDP2 (+local=cpu)."
        )
    name = f"{section}.optim.override_optimizer_config"
    if (OmegaConf.select(config, name) or {}).get("optimizer_cpu_offload"):
        raise PaddingConfigError(
            f"{name}.optimizer_cpu_offload=True: on a CPU, Megatron-Core finds no weights on a device, whose "
            "optimizer it could offload. Leave it out."
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
