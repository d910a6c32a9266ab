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

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.attention import FLASH_ATTN, FSDP
from verl_padding.job.blocker import Blocker
from verl_padding.job.known_verl import unknown_verl
from verl_padding.job.model_config import (
    has_linear_attention,
    n_routed_experts,
    rope_by_length,
)
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import REF_SECTION, RoleEngine, is_lora
from verl_padding.job.savings import PACKER, SHARING, Savings

FLASH_ATTENTION = re.compile(r"flash_attention_\d+|sdpa|[\w.-]+/[\w.-]*flash-attn[^/:]*")
"""Attentions that transformers runs by one function, which verl replaces: its own, whole kernels of
the hub, and ours in the place of sdpa."""
EXCHANGED_BY_VEOMNI = re.compile(r"veomni_\w+_with_sp|flex_attention|magi_attention")
"""Attentions of VeOmni's that exchange: it makes its own of the last two, and runs any other as
transformers has it."""
CHOOSES_AMONG_ALL = {"doge": "keep_window_size", "glm_moe_dsa": "index_topk"}
"""Types of models that choose the tokens to attend to among all that are computed -> their setting
of how many."""

BALANCING, BIAS = "moe_router_load_balancing_type", "moe_router_enable_expert_bias"
BIAS_RATE, AUX_LOSS = "moe_router_bias_update_rate", "moe_aux_loss_coeff"
FOLLOW_TOKENS = {
    True: ("deepseek_v3", "glm4v_moe"),
    False: ("deepseek_v3", "kimi_k2", "nemotron_h"),
}
"""Whether Megatron's bridge is the vanilla one -> types of models whose experts it gives biases
that follow tokens."""

LORA_SETTINGS = {"fsdp": "lora_rank", "fsdp2": "lora_rank", "megatron": "lora.rank", "veomni": None}
"""Strategy -> the setting of a model by which the engine makes an adapter; None for an engine that
makes none."""
LORA_PATH, LORA_MERGE = "lora_adapter_path", "actor_rollout_ref.model.lora.merge"
"""Settings of an adapter to start from, which Megatron's engine does not read, and of weights that
are sent merged."""
SEEN_BY_ROWS = "so pads would change what real rows see"


def check_engines(engines: Sequence[RoleEngine], padding: PaddingConfig, savings: Savings) -> None:
    """Refuses what the settings of engines show, and blocks savings that these do not admit."""
    savings.block(PACKER, packer_blockers(engines))
    if not any(engine.config.use_dynamic_bsz for engine in engines):
        savings.decline(PACKER, _has_fixed_sizes(engines[-1]))
    savings.block(SHARING, sharing_blockers(engines, savings))
    first_of: dict[str, RoleEngine] = {}
    for engine in engines:
        config = engine.config
        if engine.strategy in ("megatron", "veomni"):
            _check_groups_are_equal(first_of.setdefault(engine.strategy, engine), engine)
        if engine.strategy == "megatron":
            _check_megatron(engine, padding)
        _check_attention(engine)
        if engine.padded_to != "row" and config.use_dynamic_bsz and not savings.is_on(PACKER):
            why = (
                f"each row of {engine.section} is padded to the longest beside it, which verl's"
                " packer does not count"
            )
            fix = "Set it to True, or padding.packer=plan."
            raise PaddingConfigError(
                f"{engine.model_section}.use_remove_padding=False: {why}. {fix}"
            )


def packer_blockers(engines: Iterable[RoleEngine]) -> Iterator[Blocker]:
    """What keeps engines from taking the plan's micro-batches."""
    if blocker := unknown_verl():
        yield blocker
    for engine in engines:
        if engine.has_scheduler:
            yield Blocker(*_scheduler_cuts(engine, "padding.packer=verl"))


def _scheduler_cuts(engine: RoleEngine, instead: str) -> tuple[str, str, str]:
    setting = f"{engine.section}.megatron.dynamic_context_parallel=True"
    why = "verl's scheduler then cuts micro-batches, which neither follows a plan nor is timed"
    return setting, why, f"Set it to False, or {instead}."


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
    sizes = _sizes_of_groups(first)
    for name, size in _sizes_of_groups(other).items():
        if size != sizes[name]:
            setting = f"{other.section}.{other.strategy}.{name}={size}"
            why = (
                f"differs from {first.section}.{first.strategy}.{name}={sizes[name]}, but they"
                " share process groups"
            )
            raise PaddingConfigError(f"{setting}: {why}. Set both to the same value.")


def _sizes_of_groups(engine: RoleEngine) -> dict[str, Any]:
    config = engine.config
    sizes = {name: size for name, size in vars(config).items() if name.endswith("parallel_size")}
    if engine.strategy == "megatron":
        if sizes["expert_tensor_parallel_size"] is None:  # as Megatron-Core (parallel_state.py)
            sizes["expert_tensor_parallel_size"] = config.tensor_model_parallel_size
        return sizes | {"dynamic_context_parallel": config.dynamic_context_parallel}
    is_part = 0 <= config.fsdp_size < engine.dp_size  # as verl's VeOmniEngine
    return sizes | {"fsdp_size": config.fsdp_size if is_part else engine.dp_size}


def _check_attention(engine: RoleEngine, model_type: str | None = None) -> None:
    """Ranks that share a row by Ulysses exchange tokens for heads around its attention, which some
    attentions pass by: verl and VeOmni exchange around flash attention, each for its own engines
    (verl's ``monkey_patch.py``, VeOmni's attentions ``.._with_sp``). VeOmni's eager attention
    depends on the model's type."""
    attention, ranks, is_veomni = (
        engine.attention,
        engine.size("Ulysses"),
        engine.strategy == "veomni",
    )
    if ranks == 1 or engine.strategy not in (*FSDP, "veomni"):
        return
    if is_veomni and engine.device == "cpu":
        exchanges = attention == "sdpa"
    elif is_veomni and attention == "eager" and engine.section != "critic":
        exchanges = model_type in (
            None,
            "deepseek_v4",
        )  # whose attention exchanges by itself, in VeOmni's code of it
    else:
        known = EXCHANGED_BY_VEOMNI if is_veomni else FLASH_ATTENTION
        exchanges = isinstance(attention, str) and known.fullmatch(attention) is not None
    if not exchanges:
        section = (
            f"{engine.section}.veomni" if is_veomni else f"{engine.model_section}.override_config"
        )
        why = (
            f"each of {ranks} sequence-parallel ranks of {engine.section} would attend to its own"
            " part of a row only"
        )
        fix = (
            f"Set it to {'sdpa' if is_veomni and engine.device == 'cpu' else FLASH_ATTN}, or the"
            " Ulysses size to 1."
        )
        raise PaddingConfigError(
            f"{section}.attn_implementation={attention}: does not support Ulysses: {why}. {fix}"
        )


def _check_megatron(engine: RoleEngine, padding: PaddingConfig) -> None:
    """Refuses settings with which Megatron would not compute the plan, or pads would count."""
    section, trains, override = (
        f"{engine.section}.megatron",
        engine.section != REF_SECTION,
        engine.megatron_override,
    )
    if engine.has_scheduler and padding.timing:
        raise PaddingConfigError(str(Blocker(*_scheduler_cuts(engine, "padding.timing=false"))))
    rounds_up = engine.config.pad_to_length and engine.config.use_remove_padding
    bucket = int(engine.config.pad_to_length_bucket) if rounds_up else 0
    if bucket % (multiple := _multiple_of_packed_rows(engine)):
        why = f"context and tensor parallel ranks take lengths in multiples of {multiple}"
        fix = f"Set it to {-(-bucket // multiple) * multiple}."
        raise PaddingConfigError(f"{section}.pad_to_length_bucket={bucket}: {why}. {fix}")
    for name in _settings_that_count_pads(override, trains=trains):
        setting = f"{section}.override_transformer_config.{name}={override[name]}"
        why = "routers would count all tokens of a micro-batch, those of pads among them"
        raise PaddingConfigError(f"{setting}: {why}. Leave it out, as verl does.")
    if trains and engine.trains_mtp:
        why = (
            "Megatron takes the mean of this loss over all micro-batches, and those of pads would"
            " make it smaller"
        )
        raise PaddingConfigError(
            f"{engine.model_section}.mtp.enable_train=True: {why}. Set it to False."
        )


def _multiple_of_packed_rows(engine: RoleEngine) -> int:
    """Of what length packed rows, rounded up to a bucket, have to be a multiple: verl makes the
    last row longer, and of two chunks for context parallel ranks that differ in length drops the
    end (``preprocess_thd_engine``)."""
    config, tensor, context = engine.config, engine.size("tensor"), engine.size("context")
    # The vanilla bridge shares tokens between layers whatever verl's setting is
    # (``mbridge/core/llm_bridge.py``).
    by_default = config.vanilla_mbridge or config.sequence_parallel
    multiple = tensor if engine.megatron_override.get("sequence_parallel", by_default) else 1
    return context * lcm(multiple, 2) if context > 1 else multiple


def _settings_that_count_pads(override: Mapping[str, Any], *, trains: bool) -> Iterator[str]:
    """Settings by which routers count tokens that have no loss, too (Megatron-Core's
    ``router.py``)."""
    if (
        override.get("moe_expert_capacity_factor") or 0
    ) > 0:  # experts take so many tokens of a micro-batch
        yield "moe_expert_capacity_factor"
    if not trains:
        return
    kinds, costs = _listed(override.get(BALANCING)), _listed(override.get(AUX_LOSS))
    balances = (kinds or costs) and {*kinds} != {"none"} and (not costs or any(costs))
    if balances or "sinkhorn" in kinds:
        yield BALANCING if kinds else AUX_LOSS  # of the type that the bridge has
    if override.get("moe_z_loss_coeff"):
        yield "moe_z_loss_coeff"
    has_bias, rate = override.get(BIAS), override.get(BIAS_RATE)
    if (has_bias or rate) and has_bias is not False and rate != 0:
        yield BIAS if has_bias else BIAS_RATE


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
            _check_experts_of_megatron(engine, model)
            continue
        for part in (model, text):
            if key := CHOOSES_AMONG_ALL.get(str(part.get("model_type"))):
                why = (
                    "this model chooses what a token attends to among all that is packed"
                    f" ({key}={text.get(key)})"
                )
                raise PaddingConfigError(f"{named}: {why}, {SEEN_BY_ROWS}. Choose another model.")
        _check_chunks(engine, text, named)
        _check_linear_attention(engine, model, named)
        _check_attention(engine, str(model.get("model_type")))


def _check_linear_attention(engine: RoleEngine, model: Mapping[str, Any], named: str) -> None:
    """Refuses Ulysses ranks whose linear attention would not go on from the rank before: verl
    exchanges states for Qwen3.5's language models with a tower alone (its ``qwen3_5.py``)."""
    ranks, kind = engine.size("Ulysses"), model.get("model_type")
    exchanges = kind in ("qwen3_5", "qwen3_5_moe") and engine.section != "critic"
    if engine.strategy in FSDP and ranks > 1 and has_linear_attention(model) and not exchanges:
        why = (
            f"linear attention of model_type={kind} does not support Ulysses: each of {ranks}"
            f" ranks of {engine.section} would begin its part of a row anew"
        )
        raise PaddingConfigError(f"{named}: {why}. Set the Ulysses size to 1.")


def _check_chunks(engine: RoleEngine, text: Mapping[str, Any], named: str) -> None:
    """Attention in chunks of all packed tokens, and not of a row's, once a micro-batch is longer
    than a chunk."""
    size = text.get("attention_chunk_size")
    if not isinstance(size, int) or "chunked_attention" not in (text.get("layer_types") or ()):
        return
    ranks, budgets = (
        engine.sequence_parallel_size,
        [name for name in engine.settings if "max_token_len" in name],
    )
    longest = max(int(getattr(engine.config, name) or 0) for name in budgets) * ranks
    if engine.config.use_remove_padding and (not engine.config.use_dynamic_bsz or longest > size):
        settings = " and ".join(dict.fromkeys(engine.settings[name] for name in budgets))
        why = f"attention_chunk_size={size} cuts attention over all that is packed, {SEEN_BY_ROWS}"
        fix = f"Set {settings} to {size // ranks} at most, with dynamic batch sizes, or"
        raise PaddingConfigError(
            f"{named}: {why}. {fix} {engine.model_section}.use_remove_padding=False."
        )


def _check_experts_of_megatron(engine: RoleEngine, model: Mapping[str, Any]) -> None:
    """Refuses a model whose experts' biases would follow pads, or whose gradients would be left
    out."""
    config, override = engine.config, engine.megatron_override
    if engine.section == REF_SECTION or not n_routed_experts(model):
        return
    rate, kind = override.get(BIAS_RATE), model.get("model_type")
    if (
        kind in FOLLOW_TOKENS[bool(config.vanilla_mbridge)]
        and rate != 0
        and override.get(BIAS) is not False
    ):
        setting = f"{engine.section}.megatron.override_transformer_config.{BIAS_RATE}={rate}"
        why = (
            f"in a model of type {kind}, biases of experts would follow their tokens, those of pads"
            " among them"
        )
        raise PaddingConfigError(f"{setting}: {why}. Set it to 0.")
    tensor, of_expert = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if config.expert_model_parallel_size == 1 and of_expert not in (None, tensor):
        setting = f"{engine.section}.megatron.expert_tensor_parallel_size={of_expert}"
        # ``allreduce``
        why = (
            f"Megatron adds up gradients of experts over tensor_model_parallel_size={tensor} ranks"
        )
        raise PaddingConfigError(
            f"{setting}: with expert_model_parallel_size=1, {why}. Set it to {tensor}."
        )


def check_adapters(config: DictConfig, mode: str, engines: Iterable[RoleEngine]) -> None:
    """Refuses an adapter (LoRA) that a role's engine does not make, training the whole model
    instead, or that never reaches the rollout in this mode of verl's."""
    for engine in engines:
        if engine.section == REF_SECTION or engine.strategy not in LORA_SETTINGS:
            continue
        section, read = engine.model_section, LORA_SETTINGS[engine.strategy]
        asked = {
            name: OmegaConf.select(config, f"{section}.{name}")
            for name in (LORA_PATH, "lora_rank", "lora.rank")
        }
        asked = {name: value for name, value in asked.items() if value not in (0, None)}
        if asked and (read not in asked or (engine.strategy == "megatron" and LORA_PATH in asked)):
            name = next(name for name in asked if name != read)
            fix = f" and set {section}.{read} to the adapter's rank" if read else ""
            why = (
                f"verl's {engine.strategy} engine makes no adapter of it, and would train the whole"
                " model"
            )
            raise PaddingConfigError(f"{section}.{name}={asked[name]}: {why}. Leave it out{fix}.")
    merges, is_separate = OmegaConf.select(config, LORA_MERGE), mode == SEPARATE_ASYNC
    if is_lora(config) and not merges and (is_separate or config.trainer.device == "cpu"):
        # That rollout gets what get_per_tensor_param() of an engine gives at first, without what
        # comes beside it.
        of_mode = (
            f"in {mode}, verl sends the rollout the base model's weights alone, without what is"
            " trained"
        )
        why = of_mode if is_separate else "rollouts on a CPU take whole weights, no adapters"
        raise PaddingConfigError(f"{LORA_MERGE}={merges}: {why}. Set it to True.")
