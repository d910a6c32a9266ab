"""Refuses models whose layers run on from one packed row into the next, so that pads would change real rows.

verl's FSDP and VeOmni engines pack rows one behind the other (``use_remove_padding=True``) without an attention mask,
and tell the model by position ids alone where a row begins; cumulated lengths get those few that ask for them. Layers
that are no attention do not look at them, some models keep them from their masks, and some from flash attention. Rows
that are padded to the longest one (``use_remove_padding=False``) have a mask, and their pads behind them, where no
earlier token sees them.

Megatron is told lengths, and its own layers refuse packed rows where they cannot keep them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engine_refusals import FLASH_ATTENTION, ULYSSES, VEOMNIS_FLASH_ATTENTION
from verl_padding.job.role_engine import RoleEngine

KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types", "_block_types")
"""Keys of transformers' configs that list what each layer is."""
RUN_ON = ("linear", "mamba", "ssm", "conv", "recurrent", "hybrid", "delta", "rwkv", "lstm", "compressed")
"""Words in the name of a kind of layer that carries something from token to token, whatever row they are of."""
SETTINGS_OF_SUCH_LAYERS = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "ssm_cfg",
    "time_step_rank",
    "conv_L_cache",
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "lru_width",
)
"""Of configs that do not list their layers."""
OF_SUCH_LAYERS = ("rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm")
"""Types of models whose configs have none of these settings."""

TOLD_LENGTHS = ("qwen3_5", "qwen3_5_moe")
"""Types of models whose forward verl replaces (``monkey_patch.py``) by one that takes lengths of rows. The kernel of
flash-linear-attention follows them, and transformers' own function in its place drops them (``**kwargs``)."""
KERNEL, KERNELS_MODULE = "flash-linear-attention", "fla"
PACKED_BY_VEOMNI = (*TOLD_LENGTHS, "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v4")
"""Types of models that keep packed rows apart, or refuse them, in VeOmni's own code."""

MASKS_NOT_TOLD = (
    "afmoe",
    "bert",
    "bert-generation",
    "biogpt",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "falcon",
    "gpt_oss",
    "opt",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "xlm-roberta",
    "xlm-roberta-xl",
)
"""Types of models that make their masks without position ids, and hand these on to flash attention."""
FLASH_ATTENTION_NOT_TOLD = ("fuyu", "gpt_bigcode", "gpt_neo", "gptj", "ministral3", "persimmon", "whisper")
"""Types of models that make their masks with position ids, and keep these from flash attention."""
TOLD_BY_VEOMNI = ("gpt_bigcode", "ministral3", "persimmon")
"""Those of them whose flash attention takes the lengths of rows that VeOmni's engine gives a model."""
NOT_TOLD = (
    "bart",
    "big_bird",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "cpmant",
    "ctrl",
    "granitemoehybrid",
    "marian",
    "mbart",
    "megatron-bert",
    "moshi",
    "mpt",
    "mvp",
    "openai-gpt",
    "pegasus",
    "plbart",
    "prophetnet",
    "rembert",
    "roformer",
    "trocr",
    "xglm",
    "xlnet",
)
"""Types of models whose attention gets no position ids, whichever it is."""
CHOOSES_AMONG_ALL = {"doge": "keep_window_size", "glm_moe_dsa": "index_topk"}
"""Types of models that choose the tokens to attend to among all that are computed, also those behind a row -> their
setting of how many."""
OF_VEOMNI = ("glm_moe_dsa",)
"""Those of them that VeOmni has code of its own for, which was not tried."""


def refuse_packed_rows(engine: RoleEngine, model: Mapping[str, Any], named: str, padding: PaddingConfig) -> None:
    """Refuses a model that does not keep the packed rows of an engine apart.

    Args:
        model: the model's Hugging Face config.
        named: the model's setting and path, for messages.

    Raises:
        PaddingConfigError: pads would change the outputs of real rows.
    """
    if engine.strategy not in ULYSSES:
        return
    text = model.get("text_config") or model
    types = [str(part.get("model_type")) for part in (model, text)]
    if _has_one_row_at_once(engine) and engine.sequence_parallel_size == 1:
        return
    if not engine.config.use_remove_padding:
        _refuse_choice_among_all(engine, types, text, named)
        return
    if engine.strategy == "veomni" and engine.device != "cpu" and set(types) & set(PACKED_BY_VEOMNI):
        return
    if (layers := layers_that_run_on(text)) and not _is_told_lengths(engine, types[0]):
        kernel = f"install {KERNEL}, or " if _wants_kernel(engine, types[0]) else ""
        raise PaddingConfigError(
            f"{named}: verl packs rows one behind the other, and layers of this model ({layers}) run on from one row "
            f"into the next, so pads would change what real rows get. Choose another model, or {kernel}set "
            f"{_rows_apart(engine, padding)}."
        )
    _refuse_choice_among_all(engine, types, text, named)
    _refuse_attention_that_is_not_told(engine, types, named, padding)
    _refuse_cuts_of_what_is_packed(engine, text, named, padding)


def _refuse_choice_among_all(engine: RoleEngine, types: list[str], text: Mapping[str, Any], named: str) -> None:
    """Whether rows are packed or padded, and with any attention."""
    kind = next((kind for kind in types if kind in CHOOSES_AMONG_ALL), None)
    if kind is None or (kind in OF_VEOMNI and engine.strategy == "veomni"):
        return
    key = CHOOSES_AMONG_ALL[kind]
    raise PaddingConfigError(
        f"{named}: this model chooses what a token attends to among all that is computed beside it ({key}="
        f"{text.get(key)}), so pads would change what real rows see. Choose another model."
    )


def _refuse_attention_that_is_not_told(
    engine: RoleEngine, types: list[str], named: str, padding: PaddingConfig
) -> None:
    flash = _is_flash_attention(engine)
    if kind := next((kind for kind in types if kind in NOT_TOLD), None):
        raise PaddingConfigError(
            f"{named}: verl packs rows one behind the other, and attention in a model of type {kind} is not told where "
            f"a row begins, so real rows would see pads. Choose another model, or set {_rows_apart(engine, padding)}."
        )
    not_told = FLASH_ATTENTION_NOT_TOLD if flash else MASKS_NOT_TOLD
    told = TOLD_BY_VEOMNI if flash and engine.strategy == "veomni" else ()
    if kind := next((kind for kind in types if kind in not_told and kind not in told), None):
        fix = _rows_apart(engine, padding)
        if not flash and engine.device != "cpu":
            fix = f"{engine.attention_setting}=flash_attention_2, or {fix}"
        elif flash and engine.strategy != "veomni" and engine.section != "critic":
            alone = f" and {ULYSSES[engine.strategy]}=1" if engine.sequence_parallel_size > 1 else ""
            fix = f"{engine.attention_setting}=sdpa{alone}, or {fix}"
        raise PaddingConfigError(
            f"{engine.attention_setting}={_attention(engine)}: verl packs rows one behind the other, and a model of "
            f"type {kind} does not tell this attention where a row begins ({named}), so real rows would see pads. Set "
            f"{fix}."
        )


def _refuse_cuts_of_what_is_packed(
    engine: RoleEngine, text: Mapping[str, Any], named: str, padding: PaddingConfig
) -> None:
    """Attention in chunks of all packed tokens, and not of a row's."""
    size, longest = text.get("attention_chunk_size"), _most_tokens(engine)
    if not isinstance(size, int) or "chunked_attention" not in (text.get("layer_types") or ()):
        return
    if longest is None or longest > size:
        most = size // engine.sequence_parallel_size
        budgets = [engine.settings[name] for name in BUDGETS if name in engine.settings]
        told = f"{' and '.join(dict.fromkeys(budgets))} to {most} at most, or " if longest is not None else ""
        raise PaddingConfigError(
            f"{named}: verl packs rows one behind the other, and this model cuts attention over all that is packed "
            f"(attention_chunk_size={size}) and not row by row, so pads would change what real rows see once a "
            f"micro-batch is longer. Set {told}{_rows_apart(engine, padding)}."
        )


def layers_that_run_on(text: Mapping[str, Any]) -> str:
    """Those layers of a model that are no attention and carry something from token to token, in words; "" for none."""
    listed = [kinds for key in KINDS_OF_LAYERS if isinstance(kinds := text.get(key), (list, tuple)) and kinds]
    if listed:
        run_on = _that_run_on(str(kind) for kinds in listed for kind in kinds)
        return ", ".join(dict.fromkeys(run_on))
    if text.get("model_type") in OF_SUCH_LAYERS:
        return f"model_type={text['model_type']}"
    return next((f"{key}={text[key]}" for key in SETTINGS_OF_SUCH_LAYERS if text.get(key)), "")


def _that_run_on(kinds: Iterator[str]) -> Iterator[str]:
    for kind in kinds:
        if any(word in kind.lower() for word in RUN_ON):
            yield kind


def _is_told_lengths(engine: RoleEngine, kind: str) -> bool:
    return _wants_kernel(engine, kind) and find_spec(KERNELS_MODULE) is not None


def _wants_kernel(engine: RoleEngine, kind: str) -> bool:
    """Whether verl tells the model lengths, which only the kernel follows. Models with a head for values are not told
    them, and transformers takes the kernel on a GPU only."""
    return (
        kind in TOLD_LENGTHS and engine.strategy != "veomni" and engine.section != "critic" and engine.device != "cpu"
    )


def _attention(engine: RoleEngine) -> Any:
    """verl's ``load_valuehead_model`` does not look at the attention that is set."""
    fixed = engine.section == "critic" and engine.strategy != "veomni" and engine.device != "cpu"
    return "flash_attention_2" if fixed else engine.attention


def _is_flash_attention(engine: RoleEngine) -> bool:
    attention = _attention(engine)
    if not isinstance(attention, str):
        return False
    return any(known.fullmatch(attention) for known in (FLASH_ATTENTION, VEOMNIS_FLASH_ATTENTION))


BUDGETS = ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")
ROWS = ("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu")
"""Fields of an engine's config that bound its micro-batches, by tokens or by rows."""


def _most_tokens(engine: RoleEngine) -> int | None:
    """Tokens that a micro-batch may hold; None where it is cut by rows."""
    if not engine.config.use_dynamic_bsz:
        return None
    return max(int(getattr(engine.config, name)) for name in BUDGETS if name in engine.settings) * (
        engine.sequence_parallel_size
    )


def _has_one_row_at_once(engine: RoleEngine) -> bool:
    """Whether no micro-batch has two rows: each is then computed by itself."""
    rows = [getattr(engine.config, name) for name in ROWS if name in engine.settings]
    return not engine.config.use_dynamic_bsz and rows == [1] * len(rows)


def _rows_apart(engine: RoleEngine, padding: PaddingConfig) -> str:
    """The settings with which each row is padded by itself."""
    settings = [f"{engine.model_section}.use_remove_padding=False"]
    if engine.config.use_dynamic_bsz and padding.packer == "verl":
        settings.append("padding.packer=plan")
    if padding.sharing != "off":
        settings.append("padding.sharing=off")
    if engine.sequence_parallel_size > 1:
        settings.append(f"{ULYSSES[engine.strategy]}=1")
    return " and ".join(settings)
