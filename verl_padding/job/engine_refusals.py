"""Refuses what an engine would do in silence: plan other than it computes, share rows wrongly, or
let pads change rows.

What verl, Megatron or VeOmni refuse by themselves is theirs to say, and what a short row shows,
that of the probe (``worker/cross_contamination.py``). Each check raises a PaddingConfigError that
has the setting, its value and the fix.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import Incompatibility, refuse
from verl_padding.job.attention import FLASH_ATTN, FSDP
from verl_padding.job.model_config import has_linear_attention, rope_by_length
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import RoleEngine, is_lora
from verl_padding.job.savings import PACKER, SHARING, Savings
from verl_padding.job.verl_check import saving_incompatibilities
from verl_padding.plan.cost import up_to_multiple

FLASH_ATTENTION = r"flash_attention_\d+|sdpa|[\w.-]+/[\w.-]*flash-attn[^/:]*"
"""Attentions that transformers runs by one function, which verl replaces: its own, whole kernels of
the hub, and ours in the place of sdpa."""
VEOMNI_ATTENTION = r"veomni_\w+_with_sp|flex_attention|magi_attention"
"""Attentions of VeOmni's that exchange: it makes its own of the last two, and runs any other as
transformers has it."""

CHUNK = "attention_chunk_size"
DEPENDS_ON_ALL = (CHUNK, "index_topk", "keep_window_size")
"""Settings of models in which what a token attends to depends on all that is computed beside it,
once that is longer than this many tokens, which the probe is not."""

LORA_MERGE = "actor_rollout_ref.model.lora.merge"
ADAPTERS = {
    **dict.fromkeys(FSDP, ("lora_rank", "lora_adapter_path")),
    "megatron": ("lora.rank", "lora.adapter_path"),
    "veomni": (),
}
"""Backend -> settings of a model by which it makes an adapter: its rank, and where it begins."""


def check_engines(engines: Sequence[RoleEngine], savings: Savings) -> None:
    """Refuses what the settings of engines show, and blocks savings that these do not admit."""
    strategies = {engine.strategy for engine in engines}
    for saving in (PACKER, SHARING):
        savings.block(saving, saving_incompatibilities(saving, strategies))
    if not any(engine.config.use_dynamic_bsz for engine in engines):
        savings.block_unless_explicit(PACKER, _has_fixed_sizes(engines[-1]))
    savings.block(SHARING, sharing_incompatibilities(engines, savings))
    for engine in engines:
        if engine.strategy == "megatron":
            _check_megatron(engine)
        _check_attention(engine)
        is_cut_by_verl = engine.config.use_dynamic_bsz and not savings.is_on(PACKER)
        if engine.padded_to != "row" and is_cut_by_verl:
            refuse(
                f"{engine.model_section}.use_remove_padding=False",
                "verl's packer does not count the padding to the longest row of a micro-batch",
                "Set it to True, or padding.packer=plan.",
            )


def sharing_incompatibilities(
    engines: Iterable[RoleEngine], savings: Savings
) -> Iterator[Incompatibility]:
    """What keeps rows of a micro-batch from sharing what they compute."""
    if not savings.is_on(PACKER):
        why = "only the plan keeps rows that share in one micro-batch"
        yield from savings.incompatibilities[PACKER] or [
            Incompatibility("padding.packer=verl", why, "Set it to plan or auto.")
        ]
    for engine in engines:
        replay = getattr(getattr(engine.config, "router_replay", None), "mode", "disabled")
        if engine.strategy not in FSDP and replay != "disabled":
            setting = f"{engine.section}.{engine.strategy}.router_replay.mode={replay}"
            yield Incompatibility(setting, "routes are kept per row", "Set it to disabled.")
        if not engine.config.use_remove_padding:
            setting = f"{engine.model_section}.use_remove_padding=False"
            yield Incompatibility(setting, "only packed rows can share", "Set it to True.")
        if not engine.config.use_dynamic_bsz:
            yield _has_fixed_sizes(engine)


def _has_fixed_sizes(engine: RoleEngine) -> Incompatibility:
    setting = f"{engine.settings['use_dynamic_bsz']}=False"
    return Incompatibility(setting, "micro-batches are not cut by tokens", "Set it to True.")


def _check_attention(engine: RoleEngine) -> None:
    """Ranks that share a row by Ulysses exchange tokens for heads around its attention, which some
    attentions pass by: verl and VeOmni exchange around flash attention, each for its own engines
    (verl's ``monkey_patch.py``, VeOmni's attentions ``.._with_sp``)."""
    attention, ranks = engine.attention, engine.size("Ulysses")
    section = f"{engine.model_section}.override_config"
    known = FLASH_ATTENTION
    if engine.strategy == "veomni":
        section, known = f"{engine.section}.veomni", VEOMNI_ATTENTION
    if ranks > 1 and not (isinstance(attention, str) and re.fullmatch(known, attention)):
        refuse(
            f"{section}.attn_implementation={attention}",
            f"each of {ranks} Ulysses ranks would attend to its own part of a row",
            f"Set it to {FLASH_ATTN}, or the Ulysses size to 1.",
        )


def _check_megatron(engine: RoleEngine) -> None:
    """Refuses settings with which Megatron would not compute the plan."""
    section, config = f"{engine.section}.megatron", engine.config
    if config.dynamic_context_parallel:
        refuse(
            f"{section}.dynamic_context_parallel=True",
            "verl's scheduler would cut micro-batches, not the plan",
            "Set it to False.",
        )
    # verl makes the last row longer, and of two chunks for context parallel ranks that differ in
    # length drops the end (``preprocess_thd_engine``).
    bucket, multiple = int(config.pad_to_length_bucket or 0), engine.row_multiple
    if config.pad_to_length and config.use_remove_padding and bucket % multiple:
        refuse(
            f"{section}.pad_to_length_bucket={bucket}",
            f"GPUs that split rows take lengths in multiples of {multiple}",
            f"Set it to {up_to_multiple(bucket, multiple)}.",
        )


def length_incompatibilities(named: str, model: Mapping[str, Any]) -> Iterator[Incompatibility]:
    """What in a model, by its Hugging Face config, keeps a row from sharing with a longer one."""
    if rope := rope_by_length(model):
        why = f"{rope}, so a prefix differs by the row's length"
        yield Incompatibility(named, why, "Choose another model, or padding.sharing=off.")


def check_model(named: str, model: Mapping[str, Any], engines: Sequence[RoleEngine]) -> None:
    """Refuses a model, by its Hugging Face config, whose outputs pads would change in longer rows
    than those of the probe. ``named`` is its path with its setting, and ``engines`` are those that
    compute it."""
    text = model.get("text_config") or model
    for engine in engines:
        if engine.strategy == "megatron":  # whose code is not transformers'
            continue
        for key in DEPENDS_ON_ALL:
            # Unpacked, a chunk is of a row's tokens.
            if text.get(key) and (key != CHUNK or engine.config.use_remove_padding):
                unpack = f", or set {engine.model_section}.use_remove_padding=False."
                refuse(
                    named,
                    f"{key}={text[key]} makes attention depend on everything packed with the row",
                    "Choose another model" + (unpack if key == CHUNK else "."),
                )
        _check_linear_attention(engine, model, named)


def _check_linear_attention(engine: RoleEngine, model: Mapping[str, Any], named: str) -> None:
    """Refuses Ulysses ranks whose linear attention would not go on from the rank before: verl
    exchanges states for Qwen3.5's language models with a tower alone (its ``qwen3_5.py``)."""
    kind, ranks = model.get("model_type"), engine.size("Ulysses")
    exchanges = kind in ("qwen3_5", "qwen3_5_moe") and engine.section != "critic"
    if engine.strategy in FSDP and ranks > 1 and has_linear_attention(model) and not exchanges:
        why = f"each of {ranks} Ulysses ranks would miss the state before its part of a row"
        refuse(f"{named}, model_type={kind}", why, "Set the Ulysses size to 1.")


def check_adapters(config: DictConfig, mode: str, engines: Iterable[RoleEngine]) -> None:
    """Refuses an adapter (LoRA) that an engine does not make, which would train the whole model
    instead, or that never reaches the rollout."""
    for engine in engines:
        section, own = engine.model_section, ADAPTERS[engine.strategy]
        given = {
            name: value
            for name in dict.fromkeys(chain(*ADAPTERS.values()))
            if (value := OmegaConf.select(config, f"{section}.{name}")) not in (None, "", 0, -1)
        }
        has_rank = bool(own) and own[0] in given
        for name, value in given.items():
            if not has_rank or not (name in own or name.endswith("rank")):
                fix = " and ".join(f"{section}.{each}" for each in own)
                refuse(
                    f"{section}.{name}={value}",
                    f"verl's {engine.strategy} engine ignores it",
                    f"Set {fix}." if fix else "Leave it out.",
                )
    merges = OmegaConf.select(config, LORA_MERGE)
    gets_base = mode == SEPARATE_ASYNC or config.trainer.device == "cpu"
    if is_lora(config) and not merges and gets_base:
        # That rollout gets what get_per_tensor_param() of an engine gives at first, without what
        # comes beside it.
        why = f"in {SEPARATE_ASYNC} and on a CPU, the adapter does not reach the rollout"
        refuse(f"{LORA_MERGE}={merges}", why, "Set it to True.")
