"""Refuses what a pad would change in Megatron's engine, and what its scheduler of context parallel ranks cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

BALANCING = "moe_router_load_balancing_type"
BALANCING_COST = "moe_aux_loss_coeff"
AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Choices of ``moe_router_load_balancing_type`` that are losses."""
SINKHORN = "sinkhorn"
"""The choice that is no loss. In a list, it chooses nothing."""
OVERRIDE = "{}.megatron.override_transformer_config"


def refuse_megatron(engine: RoleEngine, padding: PaddingConfig) -> None:
    """Refuses settings of one of Megatron's engines.

    Raises:
        PaddingConfigError: one message with the setting, its value and the fix.
    """
    if not engine.config.use_mbridge:
        raise PaddingConfigError(
            f"{engine.section}.megatron.use_mbridge=False: verl's Megatron engine takes weights by a bridge only. Set "
            "it to True."
        )
    _refuse_low_precision_of_padded_rows(engine)
    if engine.has_scheduler:
        _refuse_scheduler(engine, padding)
    _refuse_stages_without_pipeline(engine)
    _refuse_replay_of_buckets(engine)
    _refuse_uneven_buckets(engine)
    _refuse_limited_experts(engine)
    if engine.section != REF_SECTION:  # it does not train
        _refuse_routers_that_count(engine)
        if engine.trains_mtp:
            raise PaddingConfigError(
                f"{engine.model_section}.mtp.enable_train=True: Megatron takes the mean of this loss over each "
                "micro-batch and then over all micro-batches, those of pads alone among them, so pads would make it "
                "smaller. Set it to False."
            )


def _refuse_scheduler(engine: RoleEngine, padding: PaddingConfig) -> None:
    setting = f"{engine.section}.megatron.dynamic_context_parallel=True"
    config = engine.config
    if engine.section == "critic":
        raise PaddingConfigError(f"{setting}: verl supports it for language models only. Set it to False.")
    if padding.packer == "plan":
        raise PaddingConfigError(
            f"{setting}: verl then cuts micro-batches by a scheduler of its own. Set it to False, or "
            "padding.packer=verl."
        )
    if padding.timing:
        raise PaddingConfigError(
            f"padding.timing=True: with {setting}, only one rank would tell what its micro-batches took. Set it to "
            "false, or dynamic_context_parallel to False."
        )
    if not config.use_remove_padding:
        raise PaddingConfigError(
            f"{engine.model_section}.use_remove_padding=False: {setting} needs packed rows. Change one of the two."
        )
    ranks = engine.n_gpus // (int(config.tensor_model_parallel_size) * int(config.pipeline_model_parallel_size))
    if ranks < 2 or ranks % 2:
        raise PaddingConfigError(
            f"{setting}: Megatron's scheduler deals rows out to an even number of ranks, and this job has {ranks} for "
            "it (trainer.n_gpus_per_node x trainer.nnodes / tensor / pipeline parallel sizes). Change one of them."
        )
    override = overridden(engine)
    if override.get("fp8") not in (None, False):
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.fp8={override['fp8']}: verl does not run it together with "
            "dynamic_context_parallel=True. Set it to null, or dynamic_context_parallel to False."
        )
    if override.get("moe_router_fusion") and config.router_replay.mode != "disabled":
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.moe_router_fusion=True: verl does not run it together with "
            "dynamic_context_parallel=True where routes are replayed. Set it to False, or dynamic_context_parallel to "
            "False."
        )
    without = {"pad_to_length": False, "virtual_pipeline_model_parallel_size": None}
    for name, off in without.items():
        value = getattr(config, name)
        if value is True or (value or 1) > 1:
            raise PaddingConfigError(
                f"{engine.section}.megatron.{name}={value}: verl does not run it together with "
                f"dynamic_context_parallel=True. Set it to {off}, or dynamic_context_parallel to False."
            )


def _refuse_low_precision_of_padded_rows(engine: RoleEngine) -> None:
    """As verl's ``gptmodel_forward_model_engine`` asserts it."""
    if (fp8 := overridden(engine).get("fp8")) is not None and not engine.config.use_remove_padding:
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.fp8={fp8}: verl computes packed rows alone in it, and "
            f"{engine.model_section}.use_remove_padding=False. Set that to True, or this to null."
        )


def _refuse_stages_without_pipeline(engine: RoleEngine) -> None:
    """As Megatron-Core's ``initialize_model_parallel``, for 1 as well."""
    stages, pipeline = engine.config.virtual_pipeline_model_parallel_size, engine.config.pipeline_model_parallel_size
    if stages is not None and int(pipeline) < 2:
        raise PaddingConfigError(
            f"{engine.section}.megatron.virtual_pipeline_model_parallel_size={stages}: Megatron divides the stages of "
            f"a pipeline, and pipeline_model_parallel_size={pipeline} is none. Set it to null, or that to 2 or more."
        )


def _refuse_replay_of_buckets(engine: RoleEngine) -> None:
    """As ``forward_step`` of verl's engine for policies."""
    config = engine.config
    mode = config.router_replay.mode
    if engine.section != "critic" and config.pad_to_length and config.use_remove_padding and mode != "disabled":
        raise PaddingConfigError(
            f"{engine.section}.megatron.pad_to_length=True: verl does not run it together with "
            f"router_replay.mode={mode}. Set it to False, or the mode to disabled."
        )


def _refuse_uneven_buckets(engine: RoleEngine) -> None:
    """verl rounds packed rows up to a bucket, by making the last of them longer, and asks no more of that one than that
    context parallel ranks have equally many tokens (``preprocess_thd_engine``): of two chunks that are not as long as
    each other, it drops the end."""
    config = engine.config
    if not (config.pad_to_length and config.use_remove_padding):
        return
    tensor, context = int(config.tensor_model_parallel_size), int(config.context_parallel_size)
    multiple = tensor if engine.megatron_sequence_parallel else 1
    if context > 1:
        multiple = context * lcm(multiple, 2)
    bucket = int(config.pad_to_length_bucket)
    if bucket % multiple:
        raise PaddingConfigError(
            f"{engine.section}.megatron.pad_to_length_bucket={bucket}: ranks that share a row (context or tensor "
            f"parallel) take lengths in multiples of {multiple}, and rows that are rounded up to this may have others. "
            f"Set it to {-(-bucket // multiple) * multiple}."
        )


def _refuse_limited_experts(engine: RoleEngine) -> None:
    """Of each expert's tokens, in training and in passes (Megatron-Core's ``apply_router_token_dropping``)."""
    factor = overridden(engine).get("moe_expert_capacity_factor")
    if factor is not None and factor >= 0:
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.moe_expert_capacity_factor={factor}: an expert would take so many "
            "tokens of a micro-batch and no more, and pads would take places of real ones. Leave it out, as verl does."
        )


def _refuse_routers_that_count(engine: RoleEngine) -> None:
    override = overridden(engine)
    if override.get(BALANCING) == SINKHORN:
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.{BALANCING}={SINKHORN}: in training, the experts of a token would be "
            "chosen by all tokens of its micro-batch, those of pads among them. Leave it out, as verl does."
        )
    for name, value in _counts_all_tokens(override):
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.{name}={value}: the router would learn from all "
            "tokens of a micro-batch, those of pads among them. Leave it out, as verl does."
        )


def refuse_weights_without_buffer(engine: RoleEngine, optim: Mapping[str, Any]) -> None:
    """For an actor, whose weights go to the rollout (verl's ``get_per_tensor_param``).

    Args:
        optim: the section of its optimizer.

    Raises:
        PaddingConfigError: verl would look for them in a buffer that Megatron has not made.
    """
    config = engine.config
    made = (
        config.use_distributed_optimizer
        or config.use_megatron_fsdp
        or (config.override_ddp_config or {}).get("use_distributed_optimizer")
        or optim.get("use_layer_wise_distributed_optimizer")
    )
    if not made:
        raise PaddingConfigError(
            f"{engine.section}.megatron.use_distributed_optimizer=False: verl hands weights to the rollout from a "
            "buffer that Megatron makes for this optimizer. Set it to True."
        )


def overridden(engine: RoleEngine) -> Mapping[str, Any]:
    """Settings of Megatron's ``TransformerConfig`` that are the job's own, and not the bridge's."""
    return engine.config.override_transformer_config or {}


def _counts_all_tokens(override: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings by which a router learns from tokens that have no loss, too (Megatron-Core's ``router.py``)."""
    balancing, cost = override.get(BALANCING), _listed(override.get(BALANCING_COST))
    if balancing is None:  # the bridge's: "none" for most models
        yield from ((BALANCING_COST, override[BALANCING_COST]) for _ in filter(None, cost))
    elif set(_listed(balancing)) & set(AUXILIARY) and (not cost or any(cost)):
        yield BALANCING, balancing
    if override.get("moe_z_loss_coeff"):
        yield "moe_z_loss_coeff", override["moe_z_loss_coeff"]
    rate = override.get("moe_router_bias_update_rate")
    if override.get("moe_router_enable_expert_bias") and rate != 0:
        yield "moe_router_enable_expert_bias", True
    elif rate and override.get("moe_router_enable_expert_bias") is not False:
        yield "moe_router_bias_update_rate", rate


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)
