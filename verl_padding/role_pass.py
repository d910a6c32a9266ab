"""What the section of a role in a verl config says of its worker calls."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.plan import PlanError, TransformerCost


def read_model_config(model: DictConfig, section: str) -> dict[str, Any]:
    """The Hugging Face config of the model of ``section`` (``actor_rollout_ref`` or ``critic``), with its overrides.

    Raises:
        PaddingConfigError: it cannot be read.
    """
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    path = model.get("hf_config_path") or model.path
    try:
        config = AutoConfig.from_pretrained(
            copy_to_local(path), trust_remote_code=bool(model.get("trust_remote_code", False))
        ).to_dict()
    except (OSError, ValueError) as error:
        raise PaddingConfigError(
            f"the config of {section}.model.path={path} cannot be read ({error}). Correct the path."
        ) from error
    override = OmegaConf.to_container(model.get("override_config") or OmegaConf.create({}), resolve=True)
    assert isinstance(override, dict)
    return config | override.get("model_config", override)


def read_model_cost(model: DictConfig, section: str) -> TransformerCost:
    """What rows cost the model of a section.

    Raises:
        PaddingConfigError: its config cannot be read, or is one whose operations are not known.
    """
    try:
        return TransformerCost.from_config(read_model_config(model, section), lm_head=section != "critic")
    except PaddingConfigError as refusal:
        raise PaddingConfigError(
            f"padding.cost_model='model': {refusal} Or set padding.cost_model=attention."
        ) from refusal
    except PlanError as refusal:
        raise PaddingConfigError(
            f"padding.cost_model='model': {refusal} ({section}.model.path={model.path})"
        ) from refusal


def pass_fields(
    dp_size: int,
    *,
    role: DictConfig,
    dynamic: bool,
    token_budget: int | None,
    micro_batch: int | None,
    setting: str,
) -> dict[str, Any]:
    """Fields of a planner's pass.

    Args:
        dynamic: micro-batches are cut by tokens, not by rows.
        token_budget: tokens of a micro-batch on one GPU.
        micro_batch: rows of a micro-batch.
        setting: name of the settings but for their ends, ``_max_token_len_per_gpu`` and ``_micro_batch_size_per_gpu``.

    Raises:
        PaddingConfigError: the one of the two that is needed is not set.
    """
    budget_setting = f"{setting}_max_token_len_per_gpu"
    size_setting = f"{setting}_micro_batch_size_per_gpu"
    if dynamic:
        if token_budget is None:
            raise PaddingConfigError(f"{budget_setting}=None: dynamic batch sizes need a token budget. Set it.")
        return {
            "dp_size": dp_size,
            "micro_batch_multiple": virtual_pipeline_multiple(role),
            "token_budget": token_budget * sequence_parallel_size(role),
            "ranks_meet": "mini_batch" if role.strategy == "megatron" else "micro_batch",
            "budget_setting": budget_setting,
        }
    if micro_batch is None:
        raise PaddingConfigError(
            f"{size_setting}=None: without dynamic batch sizes the rows of a micro-batch must be set."
        )
    return {
        "dp_size": dp_size,
        "micro_batch_rows": micro_batch,
        "micro_batch_multiple": virtual_pipeline_multiple(role),
    }


def engine_section(role: DictConfig) -> DictConfig:
    """The section of the role's engine; an empty one if it has none."""
    for name in ("fsdp", "fsdp_config", "megatron", "veomni", "torchtitan"):
        if name in role and role[name] is not None:
            return role[name]
    return OmegaConf.create({})


def sequence_parallel_size(role: DictConfig) -> int:
    """Ranks that share a row: verl multiplies the token budget by it."""
    if role.strategy == "megatron":
        return int(role.megatron.context_parallel_size)
    engine = engine_section(role)
    return max(
        int(role.get("ulysses_sequence_parallel_size") or 1),
        int(engine.get("ulysses_sequence_parallel_size") or 1),
        int(engine.get("ulysses_parallel_size") or 1),
    )


def model_parallel_size(role: DictConfig) -> int:
    """GPUs that work on the same rows."""
    size = sequence_parallel_size(role)
    if role.strategy == "megatron":
        size *= int(role.megatron.tensor_model_parallel_size) * int(role.megatron.pipeline_model_parallel_size)
    return size


def virtual_pipeline_multiple(role: DictConfig) -> int:
    """Megatron's interleaved schedule wants a multiple of the pipeline size of micro-batches, each with a row."""
    if role.strategy == "megatron" and role.megatron.get("virtual_pipeline_model_parallel_size"):
        return int(role.megatron.pipeline_model_parallel_size)
    return 1
