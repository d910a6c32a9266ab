"""Refuses engines that cannot be planned for, or that verl could not run, as far as their configs show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from math import prod
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engines_on_cpu import refuse_megatron_on_a_cpu, refuse_other_versions
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


ULYSSES = {
    "fsdp": "ulysses_sequence_parallel_size",
    "fsdp2": "ulysses_sequence_parallel_size",
    "veomni": "ulysses_parallel_size",
}
"""Strategy -> its setting of the ranks that share a row by Ulysses."""
FLASH_ATTENTION = re.compile(r"flash_attention_\d+|[\w.-]+/[\w.-]*flash-attn[^/:]*")
"""Attentions that transformers runs by one function, which verl replaces: its own, and kernels of the hub, unless one
of their functions is named (``:name``)."""
VEOMNIS_FLASH_ATTENTION = re.compile(r"veomni_flash_attention_\w+_with_sp")
"""VeOmni's names of its flash attentions."""
EXCHANGED_BY_VEOMNI = re.compile(r"veomni_\w+_with_sp|flex_attention|magi_attention")
"""Attentions of VeOmni's that exchange. It makes its own of the last two (``OpsImplementationConfig``), unless the
environment has another ``MODELING_BACKEND`` than ``veomni``, as verl does of flash attention; it runs any other as
transformers has it, and warns."""
SHARING_ENGINES = ("fsdp", "fsdp2")
"""Engines in which rows that extend each other can be computed once."""


def refuse_engines(engines: Sequence[RoleEngine], padding: PaddingConfig) -> None:
    """Refuses engines that do not work with the plan, or in verl 0.9.

    Raises:
        PaddingConfigError: one message with the setting, its value and the fix.
    """
    refuse_unequal_groups(engines)
    for engine in engines:
        _refuse_uneven_ranks(engine)
        if engine.strategy == "megatron":
            refuse_megatron(engine, padding)
        if engine.padded_to != "row":
            _refuse_padded_rows(engine, padding)
        _refuse_attention_past_ulysses(engine)
        if engine.device == "cpu":
            _refuse_on_a_cpu(engine)
        if padding.sharing != "off":
            _refuse_sharing(engine, padding)
        if padding.cost_model == "measured":
            _refuse_measured(engine)


def refuse_untried_versions(engines: Iterable[RoleEngine]) -> None:
    """Refuses engines on a CPU whose packages are here in versions that were not tried.

    Not part of :func:`refuse_engines`: a plan does not depend on it, and the doctor tells it of the packages.

    Raises:
        PaddingConfigError: one message with the package, its version and the command that installs the other.
    """
    for engine in engines:
        if engine.device == "cpu":
            with suppress(PackageNotFoundError):  # which verl tells, and the doctor
                refuse_other_versions(engine.strategy)


def _refuse_measured(engine: RoleEngine) -> None:
    pipeline = getattr(engine.config, "pipeline_model_parallel_size", 1) or 1
    if engine.padded_to != "row":
        why = "the engine pads rows, and clocks tell nothing of a row's own cost"
    elif pipeline > 1:
        why = (
            f"pipeline_model_parallel_size={pipeline}: micro-batches take turns there, and none has seconds of its own"
        )
    elif engine.has_scheduler:
        why = "verl's scheduler deals parts of rows out to ranks (dynamic_context_parallel=True)"
    else:
        return
    raise PaddingConfigError(
        f"padding.cost_model='measured', {engine.section}: {why}. Set padding.cost_model=model or attention."
    )


def refuse_unequal_groups(engines: Sequence[RoleEngine]) -> None:
    """Refuses Megatron or VeOmni engines that ask for different process groups.

    Both make their groups once a process, with the sizes of the engine that starts first, and all roles of a job share
    their processes (verl's ``MegatronEngine._init_device_mesh``, VeOmni's ``init_parallel_state``).

    Raises:
        PaddingConfigError: two sizes differ.
    """
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


def _refuse_uneven_ranks(engine: RoleEngine) -> None:
    if engine.strategy == "torchtitan":
        return
    if engine.n_gpus % engine.model_ranks == 0:
        if engine.strategy == "veomni":
            _refuse_uneven_shards(engine)
        _refuse_uneven_experts(engine)
        return
    raise PaddingConfigError(
        f"{engine.section}: {engine.model_ranks} ranks compute a row together ({engine.shape}), which does not divide "
        f"the job's {engine.n_gpus} ranks (trainer.n_gpus_per_node x trainer.nnodes). Set these parallel sizes so that "
        "their product, but for virtual stages and experts, divides it."
    )


def _refuse_uneven_shards(engine: RoleEngine) -> None:
    """As verl's ``VeOmniEngine``: groups that share a model's weights, of all data-parallel ranks or of a part."""
    size = _size_of_group(engine, "fsdp_size")
    if size == 0 or engine.dp_size % size:
        raise PaddingConfigError(
            f"{engine.section}.veomni.fsdp_size={size}: groups of so many ranks would share the model's weights, which "
            f"does not divide the {engine.dp_size} that rows are dealt out to. Set it to a divisor of "
            f"{engine.dp_size}, or to -1 for a group of all."
        )


def _refuse_uneven_experts(engine: RoleEngine) -> None:
    """As Megatron-Core's and VeOmni's ``parallel_state.py``."""
    names: list[str] = []
    among = engine.n_gpus
    if engine.strategy == "megatron":
        names = ["expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"]
    elif engine.strategy == "veomni":
        names = ["expert_parallel_size"]
        among = _size_of_group(engine, "fsdp_size") * engine.sequence_parallel_size
    sizes = {name: int(_size_of_group(engine, name)) for name in names}
    if sizes and among % prod(sizes.values()):
        told = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise PaddingConfigError(
            f"{engine.section}.{engine.strategy}.{names[0]}={sizes[names[0]]}: experts are dealt out to ranks by "
            f"{told}, which does not divide the {among} that share them. Set these sizes so that their product divides "
            "it."
        )


def _refuse_attention_past_ulysses(engine: RoleEngine) -> None:
    if is_in_veomnis_model(engine) and engine.section != "critic":
        return  # the model decides; none of those that exchange by themselves can be a critic
    refuse_attention(engine)


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
        PaddingConfigError: the attention passes by the exchange.
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
            f"{setting}={attention}: passes by the exchange between the {ranks} ranks{of_section} that share a row "
            f"(Ulysses), so each would attend to its own part of the row only. Set it to {exchanged}, or "
            f"{ULYSSES[strategy]} to 1."
        )


def _refuse_on_a_cpu(engine: RoleEngine) -> None:
    if engine.strategy == "megatron":
        refuse_megatron_on_a_cpu(engine.section, engine.model_section, engine.config)
    if engine.strategy == "veomni":
        _refuse_veomni_on_a_cpu(engine)


def _refuse_veomni_on_a_cpu(engine: RoleEngine) -> None:
    experts = int(engine.config.expert_parallel_size)
    if experts > 1:
        raise PaddingConfigError(
            f"{engine.section}.veomni.expert_parallel_size={experts}: on a CPU, VeOmni has no kernels, and without "
            "them each rank needs all experts. Set it to 1."
        )
    if engine.n_gpus == 1:
        raise PaddingConfigError(
            f"trainer.n_gpus_per_node={engine.n_gpus}: on a CPU, VeOmni loads a model only where ranks share its "
            "weights. Set it to 2."
        )
    for setting, works in _kernels_in_torch(engine):
        value = getattr(engine.config, setting)
        if value not in works:
            raise PaddingConfigError(
                f"{engine.section}.veomni.{setting}={value}: on a CPU, VeOmni computes with torch alone, without its "
                f"kernels. Set it to {works[0]}."
            )
    if engine.config.enable_fsdp_offload:
        raise PaddingConfigError(
            f"{engine.section}.veomni.enable_fsdp_offload=True: on a CPU, there is no device for which memory could be "
            "pinned. Set it to False."
        )
    if engine.config.init_device != "meta":
        raise PaddingConfigError(
            f"{engine.section}.veomni.init_device={engine.config.init_device}: on a CPU, VeOmni fills models that it "
            "has made without weights, and no others. Set it to meta."
        )


def _kernels_in_torch(engine: RoleEngine) -> Iterator[tuple[str, tuple[str, ...]]]:
    """VeOmni's settings that choose a kernel, and the values that choose torch's."""
    for field in fields(engine.config):
        if field.name.endswith("_implementation"):
            others = {"attn_implementation": ("sdpa", "eager"), "qat_implementation": ("none",)}
            yield field.name, others.get(field.name, ("eager",))


def _refuse_padded_rows(engine: RoleEngine, padding: PaddingConfig) -> None:
    setting = f"{engine.model_section}.use_remove_padding=False"
    if engine.strategy in ULYSSES and engine.sequence_parallel_size > 1:
        raise PaddingConfigError(
            f"{setting}: the {engine.sequence_parallel_size} ranks that share a row of {engine.section} (Ulysses) need "
            "packed rows. Set it to True."
        )
    if padding.packer == "verl" and engine.config.use_dynamic_bsz:
        raise PaddingConfigError(
            f"{setting}: each row of {engine.section} is then padded to the longest row beside it, but verl's packer "
            "counts only the rows' own tokens, so it fills micro-batches to several times their token budget. Set it "
            "to True, or set padding.packer=plan, whose micro-batches hold the budget with their padding."
        )
