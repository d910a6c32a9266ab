"""Refuses what an engine would do in silence: plan other than it computes, or share rows wrongly.

What verl, Megatron or VeOmni refuse by themselves is theirs to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.megatron_refusals import refuse_megatron
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
FLASH_ATTENTION = re.compile(r"flash_attention_\d+|[\w.-]+/[\w.-]*flash-attn[^/:]*")
"""Attentions that transformers runs by one function, which verl replaces: its own, and kernels of the hub, unless one
of their functions is named (``:name``)."""
EXCHANGED_BY_VEOMNI = re.compile(r"veomni_\w+_with_sp|flex_attention|magi_attention")
"""Attentions of VeOmni's that exchange. It makes its own of the last two (``OpsImplementationConfig``), and runs any
other as transformers has it."""
EXCHANGE_THEMSELVES = ("deepseek_v4",)
"""Types of models whose eager attention exchanges tokens for heads between ranks, in VeOmni's code of the model."""
FSDP = ("fsdp", "fsdp2")


def refuse_engines(engines: Sequence[RoleEngine], padding: PaddingConfig) -> None:
    """
    Raises:
        PaddingConfigError: one message with the setting, its value and the fix.
    """
    _refuse_unequal_groups(engines)
    for engine in engines:
        if engine.strategy == "megatron":
            refuse_megatron(engine, padding)
        refuse_attention(engine)
        if engine.padded_to != "row" and padding.packer == "verl" and engine.config.use_dynamic_bsz:
            raise PaddingConfigError(
                f"{engine.model_section}.use_remove_padding=False: each row of {engine.section} is then padded to the "
                "longest row beside it, but verl's packer counts only the rows' own tokens, so it fills micro-batches "
                "to several times their token budget. Set it to True, or padding.packer=plan, which counts the padding."
            )
        if padding.sharing != "off":
            _refuse_sharing(engine, padding)
        if padding.cost_model == "measured" and (engine.padded_to != "row" or engine.size("pipeline") > 1):
            raise PaddingConfigError(
                f"padding.cost_model='measured', {engine.section}: where rows are padded or go through a pipeline, the "
                "time of a micro-batch is not that of its rows. Set padding.cost_model=model or attention."
            )


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


def refuse_attention(engine: RoleEngine, model_type: str | None = None) -> None:
    """Ranks that share a row by Ulysses exchange tokens for heads around its attention, which some attentions pass by.

    verl and VeOmni exchange around flash attention, each for its own engines (verl's ``monkey_patch.py``, VeOmni's
    attentions ``.._with_sp``), and +local=cpu around sdpa.

    Args:
        model_type: of the model, which decides about VeOmni's eager attention; None where it is not known yet.

    Raises:
        PaddingConfigError: the attention does not support Ulysses.
    """
    attention, ranks, is_veomni = engine.attention, engine.size("Ulysses"), engine.strategy == "veomni"
    if ranks == 1 or engine.strategy not in (*FSDP, "veomni"):
        return
    if engine.device == "cpu":
        exchanges = attention == "sdpa"
    elif is_veomni and attention == "eager" and engine.section != "critic":
        exchanges = model_type in (None, *EXCHANGE_THEMSELVES)
    else:
        known = EXCHANGED_BY_VEOMNI if is_veomni else FLASH_ATTENTION
        exchanges = isinstance(attention, str) and known.fullmatch(attention) is not None
    if not exchanges:
        section = f"{engine.section}.veomni" if is_veomni else f"{engine.model_section}.override_config"
        raise PaddingConfigError(
            f"{section}.attn_implementation={attention}: does not support Ulysses: each of the {ranks} "
            f"sequence-parallel ranks of {engine.section} would attend to its own part of a row only. Set it to "
            f"{'sdpa' if engine.device == 'cpu' else 'flash_attention_2'}, or the engine's Ulysses size to 1."
        )


def _refuse_sharing(engine: RoleEngine, padding: PaddingConfig) -> None:
    dynamic = "log_prob_use_dynamic_bsz" if engine.section == REF_SECTION else "use_dynamic_bsz"
    needs = {
        f"{engine.section}.strategy={engine.strategy}": engine.strategy in FSDP,
        f"{engine.model_section}.use_remove_padding=False": engine.config.use_remove_padding,
        f"{engine.section}.{dynamic}=False": engine.config.use_dynamic_bsz,
    }
    for setting, holds in needs.items():
        if not holds:
            raise PaddingConfigError(
                f"padding.sharing={padding.sharing!r}: {setting}, but only FSDP's engines share prefixes, with packed "
                "rows and dynamic batch sizes. Change it, or set padding.sharing=off."
            )
