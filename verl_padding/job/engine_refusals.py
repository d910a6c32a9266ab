"""Refuses what an engine would do in silence: plan other than it computes, share rows wrongly, or
let pads change rows.

What verl, Megatron or VeOmni refuse by themselves is theirs to say, and what a short row shows,
that of the probe (``worker/leak_probe.py``). Each check raises a PaddingConfigError that has the
setting, its value and the fix.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.job.attention import FLASH_ATTN, FSDP
from verl_padding.job.blocker import Blocker, refuse
from verl_padding.job.known_verl import unknown_verl
from verl_padding.job.model_config import has_linear_attention, n_routed_experts, rope_by_length
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import REF_SECTION, RoleEngine, is_lora
from verl_padding.job.savings import PACKER, SHARING, Savings

FLASH_ATTENTION = r"flash_attention_\d+|sdpa|[\w.-]+/[\w.-]*flash-attn[^/:]*"
"""Attentions that transformers runs by one function, which verl replaces: its own, whole kernels of
the hub, and ours in the place of sdpa."""
VEOMNI_ATTENTION = r"veomni_\w+_with_sp|flex_attention|magi_attention"
"""Attentions of VeOmni's that exchange: it makes its own of the last two, and runs any other as
transformers has it."""

CHOOSES_AMONG_ALL = {"doge": "keep_window_size", "glm_moe_dsa": "index_topk"}
"""Types of models that choose the tokens to attend to among all that are computed -> their setting
of how many."""

BIAS, BIAS_RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
BALANCING, AUX_LOSS = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
CAPACITY = "moe_expert_capacity_factor"
ROUTERS_COUNT: dict[str, tuple[Any, str]] = {
    BALANCING: ("none", AUX_LOSS),
    AUX_LOSS: (0, ""),
    "moe_z_loss_coeff": (0, ""),
    BIAS: (False, BIAS_RATE),
    BIAS_RATE: (0, BIAS),
}
"""Setting by which Megatron's routers learn from tokens that have no loss, too (its ``router.py``)
-> the value with which they do not, and the setting that turns it off by 0 or False."""
BIASES_FOLLOW = {"deepseek_v3", "glm4v_moe", "kimi_k2", "nemotron_h"}
"""Types of models whose experts Megatron's bridges give biases that follow tokens."""

LORA_PATH, LORA_MERGE = "lora_adapter_path", "actor_rollout_ref.model.lora.merge"
RANKS_OF_ADAPTER = {"megatron": "lora.rank", "veomni": None}
"""Strategy -> the setting of a model by which its engine makes an adapter; None for an engine that
makes none."""
SEEN_BY_ROWS = "so pads would change what real rows see"


def check_engines(engines: Sequence[RoleEngine], savings: Savings) -> None:
    """Refuses what the settings of engines show, and blocks savings that these do not admit."""
    if blocker := unknown_verl():
        savings.block(PACKER, [blocker])
    if not any(engine.config.use_dynamic_bsz for engine in engines):
        savings.decline(PACKER, _has_fixed_sizes(engines[-1]))
    savings.block(SHARING, sharing_blockers(engines, savings))
    for engine in engines:
        first = next(each for each in engines if each.strategy == engine.strategy)
        _check_groups_are_equal(first, engine)
        if engine.strategy == "megatron":
            _check_megatron(engine)
        _check_attention(engine)
        is_cut_by_verl = engine.config.use_dynamic_bsz and not savings.is_on(PACKER)
        if engine.padded_to != "row" and is_cut_by_verl:
            refuse(
                f"{engine.model_section}.use_remove_padding=False",
                f"each row of {engine.section} is padded to the longest beside it, which verl's "
                "packer does not count",
                "Set it to True, or padding.packer=plan.",
            )


def sharing_blockers(engines: Iterable[RoleEngine], savings: Savings) -> Iterator[Blocker]:
    """What keeps rows of a micro-batch from sharing what they compute."""
    if not savings.is_on(PACKER):
        why = "only the plan keeps rows that share in one micro-batch"
        yield from savings.blockers[PACKER] or [
            Blocker("padding.packer=verl", why, "Set it to plan or auto.")
        ]
    for engine in engines:
        if engine.strategy not in FSDP:
            setting, fix = f"{engine.section}.strategy={engine.strategy}", f"Set it to {FSDP[0]}."
            yield Blocker(setting, "only FSDP's engines share", fix)
        if not engine.config.use_remove_padding:
            setting = f"{engine.model_section}.use_remove_padding=False"
            yield Blocker(setting, "only packed rows share", "Set it to True.")
        if not engine.config.use_dynamic_bsz:
            yield _has_fixed_sizes(engine)


def _has_fixed_sizes(engine: RoleEngine) -> Blocker:
    setting = f"{engine.settings['use_dynamic_bsz']}=False"
    return Blocker(setting, "no micro-batch is cut by tokens", "Set it to True.")


def _check_groups_are_equal(first: RoleEngine, other: RoleEngine) -> None:
    """Roles share their processes, and Megatron and VeOmni make groups once a process, by the
    engine that starts first (verl's ``MegatronEngine._init_device_mesh``, VeOmni's
    ``init_parallel_state``)."""
    sizes = _group_sizes(first)
    for name, size in _group_sizes(other).items():
        if size != sizes[name]:
            refuse(
                f"{other.section}.{other.strategy}.{name}={size}",
                f"differs from {first.section}.{first.strategy}.{name}={sizes[name]}, but they "
                "share process groups",
                "Set both to the same value.",
            )


def _group_sizes(engine: RoleEngine) -> dict[str, Any]:
    config = engine.config
    if engine.strategy in FSDP:  # whose engines make groups of their own
        return {}
    sizes = {name: size for name, size in vars(config).items() if name.endswith("parallel_size")}
    if engine.strategy == "megatron":
        experts = config.expert_tensor_parallel_size
        if experts is None:  # as Megatron-Core (parallel_state.py)
            experts = config.tensor_model_parallel_size
        return sizes | {"expert_tensor_parallel_size": experts}
    is_part = 0 <= config.fsdp_size < engine.dp_size  # as verl's VeOmniEngine
    return sizes | {"fsdp_size": config.fsdp_size if is_part else engine.dp_size}


def _check_attention(engine: RoleEngine) -> None:
    """Ranks that share a row by Ulysses exchange tokens for heads around its attention, which some
    attentions pass by: verl and VeOmni exchange around flash attention, each for its own engines
    (verl's ``monkey_patch.py``, VeOmni's attentions ``.._with_sp``)."""
    attention, ranks = engine.attention, engine.size("Ulysses")
    section = f"{engine.model_section}.override_config"
    known, choice = FLASH_ATTENTION, FLASH_ATTN
    if engine.strategy == "veomni":
        section, known = f"{engine.section}.veomni", VEOMNI_ATTENTION
        if engine.device == "cpu":
            known = choice = "sdpa"
    if ranks > 1 and not (isinstance(attention, str) and re.fullmatch(known, attention)):
        refuse(
            f"{section}.attn_implementation={attention}",
            f"does not support Ulysses: each of {ranks} sequence-parallel ranks of "
            f"{engine.section} would attend to its own part of a row only",
            f"Set it to {choice}, or the Ulysses size to 1.",
        )


def _check_megatron(engine: RoleEngine) -> None:
    """Refuses settings with which Megatron would not compute the plan, or pads would count."""
    section = f"{engine.section}.megatron"
    config, override = engine.config, engine.megatron_override
    if config.dynamic_context_parallel:
        refuse(
            f"{section}.dynamic_context_parallel=True",
            "verl's scheduler then cuts the micro-batches of all ranks together, and follows no "
            "plan",
            "Set it to False.",
        )
    rounds_up = config.pad_to_length and config.use_remove_padding
    bucket = int(config.pad_to_length_bucket) if rounds_up else 0
    if bucket % (multiple := _multiple_of_packed_rows(engine)):
        refuse(
            f"{section}.pad_to_length_bucket={bucket}",
            f"context and tensor parallel ranks take lengths in multiples of {multiple}",
            f"Set it to {-(-bucket // multiple) * multiple}.",
        )
    trains = engine.section != REF_SECTION
    counting = [name for name in ROUTERS_COUNT if trains and _counts_pads(name, override)]
    # With a factor of 1.25, 8 experts and 64 tokens, an expert takes its first 10 and drops the
    # rest, in passes as well: a pad may take a real token's place.
    if (override.get(CAPACITY) or 0) > 0:
        counting.append(CAPACITY)
    for name in counting:
        refuse(
            f"{section}.override_transformer_config.{name}={override[name]}",
            "routers would count all tokens of a micro-batch, those of pads among them",
            "Leave it out, as verl does.",
        )
    if trains and engine.trains_mtp:
        refuse(
            f"{engine.model_section}.mtp.enable_train=True",
            "Megatron takes the mean of this loss over all micro-batches, and those of pads would "
            "make it smaller",
            "Set it to False.",
        )
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if trains and config.expert_model_parallel_size == 1 and of_expert not in (None, tensor):
        refuse(
            f"{section}.expert_tensor_parallel_size={of_expert}",
            "with expert_model_parallel_size=1, Megatron adds up gradients of experts over "
            f"tensor_model_parallel_size={tensor} ranks",
            f"Set it to {tensor}.",
        )


def _multiple_of_packed_rows(engine: RoleEngine) -> int:
    """Of what length packed rows, rounded up to a bucket, have to be a multiple: verl makes the
    last row longer, and of two chunks for context parallel ranks that differ in length drops the
    end (``preprocess_thd_engine``)."""
    config, tensor, context = engine.config, engine.size("tensor"), engine.size("context")
    # The vanilla bridge shares tokens between layers whatever verl's setting is
    # (``mbridge/core/llm_bridge.py``).
    by_default = config.vanilla_mbridge or config.sequence_parallel
    # Four tensor parallel ranks that share tokens, and two context parallel ones, each with two
    # chunks of a row: 2 * lcm(4, 2) = 8.
    multiple = tensor if engine.megatron_override.get("sequence_parallel", by_default) else 1
    return context * lcm(multiple, 2) if context > 1 else multiple


def _counts_pads(name: str, override: Mapping[str, Any]) -> bool:
    """Whether routers learn from pads by a setting, such as an ``aux_loss`` whose coefficient is
    not 0. What normalizes over tokens does so in any case."""
    # aux_loss beside moe_aux_loss_coeff=0 changes no gradient, nor does a bias at a rate of 0.
    harmless, switch = ROUTERS_COUNT[name]
    values = _listed(override.get(name))
    switched = _listed(override.get(switch))
    is_off = bool(switched) and not any(switched)
    return "sinkhorn" in values or (any(each != harmless for each in values) and not is_off)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)


def length_blockers(named: str, model: Mapping[str, Any]) -> Iterator[Blocker]:
    """What in a model, by its Hugging Face config, keeps a row from sharing with a longer one."""
    if rope := rope_by_length(model):
        why = (
            f"this model turns positions by the length of all that it gets ({rope}), so rows differ"
            " from prefixes"
        )
        yield Blocker(named, why, "Choose another model, or padding.sharing=off.")


def check_model(named: str, model: Mapping[str, Any], engines: Sequence[RoleEngine]) -> None:
    """Refuses a model, by its Hugging Face config, whose outputs pads would change in longer rows
    than those of the probe. ``named`` is its path with its setting, and ``engines`` are those that
    compute it."""
    text = model.get("text_config") or model
    for engine in engines:
        if engine.strategy == "megatron":
            _check_expert_biases(engine, model)
            continue
        for part in (model, text):
            if key := CHOOSES_AMONG_ALL.get(str(part.get("model_type"))):
                why = (
                    "this model chooses what a token attends to among all that is packed "
                    f"({key}={text.get(key)}), {SEEN_BY_ROWS}"
                )
                refuse(named, why, "Choose another model.")
        _check_chunks(engine, text, named)
        _check_linear_attention(engine, model, named)


def _check_linear_attention(engine: RoleEngine, model: Mapping[str, Any], named: str) -> None:
    """Refuses Ulysses ranks whose linear attention would not go on from the rank before: verl
    exchanges states for Qwen3.5's language models with a tower alone (its ``qwen3_5.py``)."""
    ranks, kind = engine.size("Ulysses"), model.get("model_type")
    exchanges = kind in ("qwen3_5", "qwen3_5_moe") and engine.section != "critic"
    if engine.strategy in FSDP and ranks > 1 and has_linear_attention(model) and not exchanges:
        why = (
            f"linear attention of model_type={kind} does not support Ulysses: each of {ranks} "
            f"ranks of {engine.section} would begin its part of a row anew"
        )
        refuse(named, why, "Set the Ulysses size to 1.")


def _check_chunks(engine: RoleEngine, text: Mapping[str, Any], named: str) -> None:
    """Attention in chunks of all packed tokens, and not of a row's, once a micro-batch is longer
    than a chunk."""
    config, size = engine.config, text.get("attention_chunk_size")
    if not isinstance(size, int) or "chunked_attention" not in (text.get("layer_types") or ()):
        return
    ranks = engine.sequence_parallel_size
    budgets = [name for name in engine.settings if "max_token_len" in name]
    longest = max(int(getattr(config, name) or 0) for name in budgets) * ranks
    # Llama 4 cuts at 8192: rows of 5000 and 4000 tokens in one micro-batch are cut within the
    # second, unless no micro-batch is that long.
    if config.use_remove_padding and (not config.use_dynamic_bsz or longest > size):
        settings = " and ".join(dict.fromkeys(engine.settings[name] for name in budgets))
        refuse(
            named,
            f"attention_chunk_size={size} cuts attention over all that is packed, {SEEN_BY_ROWS}",
            f"Set {settings} to {size // ranks} at most, with dynamic batch sizes, or "
            f"{engine.model_section}.use_remove_padding=False.",
        )


def _check_expert_biases(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    override, kind = engine.megatron_override, model.get("model_type")
    is_off = override.get(BIAS_RATE) == 0 or override.get(BIAS) is False
    follows = kind in BIASES_FOLLOW and n_routed_experts(model) > 0
    if engine.section != REF_SECTION and follows and not is_off:
        refuse(
            f"{engine.section}.megatron.override_transformer_config.{BIAS_RATE}="
            f"{override.get(BIAS_RATE)}",
            f"in a model of type {kind}, biases of experts would follow their tokens, those of "
            "pads among them",
            "Set it to 0.",
        )


def check_adapters(config: DictConfig, mode: str, engines: Iterable[RoleEngine]) -> None:
    """Refuses an adapter (LoRA) that a role's engine does not make, training the whole model
    instead, or that never reaches the rollout in this mode of verl's."""
    for engine in engines:
        if engine.section == REF_SECTION:
            continue
        section, rank = engine.model_section, RANKS_OF_ADAPTER.get(engine.strategy, "lora_rank")
        asked = {}
        for name in (LORA_PATH, "lora_rank", "lora.rank"):
            if value := OmegaConf.select(config, f"{section}.{name}"):
                asked[name] = value
        # An engine whose rank is set makes an adapter, but only FSDP's start from that of a path.
        unread = set(asked)
        if rank in asked:
            unread &= set() if engine.strategy in FSDP else {LORA_PATH}
        for name in sorted(unread):
            refuse(
                f"{section}.{name}={asked[name]}",
                f"verl's {engine.strategy} engine makes no adapter of it, and would train the "
                "whole model",
                f"Leave it out and set {section}.{rank} to the adapter's rank."
                if rank
                else "Leave it out.",
            )
    merges, is_separate = OmegaConf.select(config, LORA_MERGE), mode == SEPARATE_ASYNC
    if is_lora(config) and not merges and (is_separate or config.trainer.device == "cpu"):
        # That rollout gets what get_per_tensor_param() of an engine gives at first, without what
        # comes beside it.
        in_mode = (
            f"in {mode}, verl sends the rollout the base model's weights alone, without what is "
            "trained"
        )
        on_cpu = "rollouts on a CPU take whole weights, no adapters"
        refuse(f"{LORA_MERGE}={merges}", in_mode if is_separate else on_cpu, "Set it to True.")
