"""Refuses what an engine would do in silence: plan other than it computes, let pads count, or share rows wrongly.

What verl, Megatron or VeOmni refuse by themselves is theirs to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.role_engine import REF_SECTION, RoleEngine

SHARED_SIZES = {
    "megatron": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "dynamic_context_parallel",
    ),
    "veomni": ("ulysses_parallel_size", "expert_parallel_size", "fsdp_size"),
}
"""Strategy -> settings of its process groups, which the engines of one process share."""
ULYSSES = {
    "fsdp": "ulysses_sequence_parallel_size",
    "fsdp2": "ulysses_sequence_parallel_size",
    "veomni": "ulysses_parallel_size",
}
"""Strategy -> its setting of the ranks that share a row by Ulysses."""
FLASH_ATTENTION = re.compile(r"flash_attention_\d+|[\w.-]+/[\w.-]*flash-attn[^/:]*")
"""Attentions that transformers runs by one function, which verl replaces: its own, and kernels of the hub, unless one
of their functions is named (``:name``)."""
EXCHANGED_BY_VEOMNI = re.compile(r"veomni_\w+_with_sp|flex_attention|magi_attention")
"""Attentions of VeOmni's that exchange. It makes its own of the last two (``OpsImplementationConfig``), and runs any
other as transformers has it."""
SHARING_ENGINES = ("fsdp", "fsdp2")
"""Engines in which rows that extend each other can be computed once."""
OVERRIDE = "{}.megatron.override_transformer_config"
AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Choices of Megatron's ``moe_router_load_balancing_type`` that are losses."""


def refuse_engines(engines: Sequence[RoleEngine], padding: PaddingConfig) -> None:
    """
    Raises:
        PaddingConfigError: one message with the setting, its value and the fix.
    """
    _refuse_unequal_groups(engines)
    for engine in engines:
        if engine.strategy == "megatron":
            _refuse_megatron(engine, padding)
        if engine.padded_to != "row":
            _refuse_padded_rows(engine, padding)
        if engine.section == "critic" or not is_in_veomnis_model(engine):  # there the model decides
            refuse_attention(engine)
        if padding.sharing != "off":
            _refuse_sharing(engine, padding)
        if padding.cost_model == "measured":
            _refuse_measured(engine)


def _refuse_unequal_groups(engines: Sequence[RoleEngine]) -> None:
    """Both engines make their groups once a process, with the sizes of the one that starts first, and all roles of a
    job share their processes (verl's ``MegatronEngine._init_device_mesh``, VeOmni's ``init_parallel_state``)."""
    for strategy, sizes in SHARED_SIZES.items():
        alike = [engine for engine in engines if engine.strategy == strategy]
        for engine in alike[1:]:
            for name in sizes:
                first, other = _size_of_group(alike[0], name), _size_of_group(engine, name)
                if first != other:
                    raise PaddingConfigError(
                        f"{engine.section}.{strategy}.{name}={other}: differs from {alike[0].section}.{strategy}."
                        f"{name}={first}. The {strategy} engines of a job share their process groups. Set both to the "
                        "same value."
                    )


def _size_of_group(engine: RoleEngine, name: str) -> Any:
    size = getattr(engine.config, name)
    if name == "expert_tensor_parallel_size" and size is None:  # as Megatron-Core (parallel_state.py)
        return engine.config.tensor_model_parallel_size
    if name == "fsdp_size" and not 0 <= size < engine.dp_size:  # as verl's VeOmniEngine
        return engine.dp_size
    return size


def _refuse_padded_rows(engine: RoleEngine, padding: PaddingConfig) -> None:
    if padding.packer == "verl" and engine.config.use_dynamic_bsz:
        raise PaddingConfigError(
            f"{engine.model_section}.use_remove_padding=False: each row of {engine.section} is then padded to the "
            "longest row beside it, but verl's packer counts only the rows' own tokens, so it fills micro-batches to "
            "several times their token budget. Set it to True, or padding.packer=plan, which counts the padding."
        )


def is_in_veomnis_model(engine: RoleEngine) -> bool:
    """Whether a model of VeOmni's own code attends by that code, in which some exchange between ranks."""
    return engine.strategy == "veomni" and engine.device != "cpu" and engine.attention == "eager"


def refuse_attention(engine: RoleEngine) -> None:
    """As :func:`refuse_attention_past_ulysses`."""
    refuse_attention_past_ulysses(
        engine.strategy,
        engine.device,
        engine.attention,
        engine.sequence_parallel_size,
        setting=engine.attention_setting,
        of_section=f" of {engine.section}",
    )


def refuse_attention_past_ulysses(
    strategy: str, device: str, attention: Any, ranks: int, *, setting: str, of_section: str = ""
) -> None:
    """verl and VeOmni exchange tokens for heads around flash attention, each for its own engines (verl's
    ``monkey_patch.py``, VeOmni's attentions ``.._with_sp``), and +local=cpu around sdpa.

    Args:
        attention: as :attr:`RoleEngine.attention`.
        ranks: those that share a row.
        setting: of the attention.
        of_section: ``of <section>``, where it is known.

    Raises:
        PaddingConfigError: the attention does not support Ulysses.
    """
    if strategy not in ULYSSES or ranks == 1:
        return
    exchanged = "sdpa" if device == "cpu" else "flash_attention_2"
    if device == "cpu":
        passes = attention != exchanged
    else:
        known = EXCHANGED_BY_VEOMNI if strategy == "veomni" else FLASH_ATTENTION
        passes = not isinstance(attention, str) or not known.fullmatch(attention)
    if passes:
        raise PaddingConfigError(
            f"{setting}={attention}: does not support Ulysses: each of the {ranks} sequence-parallel ranks{of_section} "
            f"would attend to its own part of a row only. Set it to {exchanged}, or {ULYSSES[strategy]} to 1."
        )


def _refuse_sharing(engine: RoleEngine, padding: PaddingConfig) -> None:
    setting = f"padding.sharing={padding.sharing!r}"
    if engine.strategy not in SHARING_ENGINES:
        raise PaddingConfigError(
            f"{setting}: the engine of {engine.section} is {engine.strategy}, and only those of "
            f"{' and '.join(SHARING_ENGINES)} share prefixes. Set padding.sharing=off."
        )
    if not engine.config.use_remove_padding:
        raise PaddingConfigError(
            f"{setting}: {engine.model_section}.use_remove_padding=False pads rows to the longest one beside them. Set "
            "it to True, or padding.sharing=off."
        )
    if not engine.config.use_dynamic_bsz:
        name = "log_prob_use_dynamic_bsz" if engine.section == REF_SECTION else "use_dynamic_bsz"
        raise PaddingConfigError(
            f"{setting}: {engine.section}.{name}=False cuts micro-batches by rows, wherever a chain ends. "
            "Set it to True, or padding.sharing=off."
        )


def _refuse_measured(engine: RoleEngine) -> None:
    pipeline = getattr(engine.config, "pipeline_model_parallel_size", 1) or 1
    if engine.padded_to != "row":
        why = "the engine pads rows, and clocks tell nothing of a row's own cost"
    elif pipeline > 1:
        why = f"pipeline_model_parallel_size={pipeline}: micro-batches alternate there, and none has seconds of its own"
    elif engine.has_scheduler:
        why = "verl's scheduler distributes parts of rows to ranks (dynamic_context_parallel=True)"
    else:
        return
    raise PaddingConfigError(
        f"padding.cost_model='measured', {engine.section}: {why}. Set padding.cost_model=model or attention."
    )


def _refuse_megatron(engine: RoleEngine, padding: PaddingConfig) -> None:
    section = f"{engine.section}.megatron"
    if engine.has_scheduler and padding.packer == "plan":
        raise PaddingConfigError(
            f"{section}.dynamic_context_parallel=True: verl then cuts micro-batches by a scheduler of its own. Set it "
            "to False, or padding.packer=verl."
        )
    if engine.has_scheduler and padding.timing:
        raise PaddingConfigError(
            f"padding.timing=True: with {section}.dynamic_context_parallel=True, only one rank would report its "
            "micro-batches. Set it to false, or dynamic_context_parallel to False."
        )
    _refuse_uneven_buckets(engine)
    override = overridden(engine)
    for name, why in _counts_pads(override, trains=engine.section != REF_SECTION):
        raise PaddingConfigError(
            f"{OVERRIDE.format(engine.section)}.{name}={override[name]}: {why}. Leave it out, as verl does."
        )
    if engine.section != REF_SECTION and engine.trains_mtp:
        raise PaddingConfigError(
            f"{engine.model_section}.mtp.enable_train=True: Megatron takes the mean of this loss over each micro-batch "
            "and then over all micro-batches, those of pads alone among them, so pads would make it smaller. Set it to "
            "False."
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
            f"{engine.section}.megatron.pad_to_length_bucket={bucket}: context and tensor parallel ranks take lengths "
            f"in multiples of {multiple}, and rows that are rounded up to this may have others. Set it to "
            f"{-(-bucket // multiple) * multiple}."
        )


def overridden(engine: RoleEngine) -> Mapping[str, Any]:
    """Settings of Megatron's ``TransformerConfig`` that are the job's own, and not the bridge's."""
    return engine.config.override_transformer_config or {}


def _counts_pads(override: Mapping[str, Any], *, trains: bool) -> Iterator[tuple[str, str]]:
    """Settings by which routers count tokens that have no loss, too (Megatron-Core's ``router.py``), and why not."""
    if (factor := override.get("moe_expert_capacity_factor")) is not None and factor >= 0:
        yield "moe_expert_capacity_factor", "experts take so many tokens of a micro-batch, and pads would take places"
    if not trains:
        return
    learns = "the router would learn from all tokens of a micro-batch, those of pads among them"
    balancing, cost = override.get("moe_router_load_balancing_type"), _listed(override.get("moe_aux_loss_coeff"))
    if balancing == "sinkhorn":
        yield "moe_router_load_balancing_type", "a token's experts would be chosen by all tokens beside it, pads too"
    elif balancing is None and any(cost):  # the bridge's type: "none" for most models
        yield "moe_aux_loss_coeff", learns
    elif {*_listed(balancing)} & {*AUXILIARY} and (not cost or any(cost)):
        yield "moe_router_load_balancing_type", learns
    if override.get("moe_z_loss_coeff"):
        yield "moe_z_loss_coeff", learns
    rate = override.get("moe_router_bias_update_rate")
    if override.get("moe_router_enable_expert_bias") and rate != 0:
        yield "moe_router_enable_expert_bias", learns
    elif rate and override.get("moe_router_enable_expert_bias") is not False:
        yield "moe_router_bias_update_rate", learns


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)
