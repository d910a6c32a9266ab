"""A model of the job's architecture, small enough for a CPU: its config shrunk, its vocabulary and tokenizer kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HEADS, HEAD = 2, 32
KEYS = {
    HEADS * HEAD: ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    2 * HEADS * HEAD: ("intermediate_size",),
    HEAD: ("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    HEAD // 2: ("qk_rope_head_dim",),
    4: ("num_experts", "n_routed_experts", "num_local_experts"),
    2: ("num_hidden_layers", "max_window_layers", "num_experts_per_tok"),
    1: ("first_k_dense_replace", "n_group", "topk_group"),
    0: ("num_nextn_predict_layers",),
}
SIZES = {key: size for size, keys in KEYS.items() for key in keys} | {
    **dict.fromkeys(("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
}
"""Largest size of each key of a text model's config."""
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64}
"""The same of a vision tower's."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A config of Hugging Face with small sizes in the place of large ones; no key is new."""
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    for key, size in SIZES.items():
        if isinstance(small.get(key), int) and not isinstance(small[key], bool):
            small[key] = min(small[key], size)
    if isinstance(small.get("head_dim"), int):
        small["head_dim"] = HEAD
    if heads := small.get("num_key_value_heads"):
        small["num_key_value_heads"] = HEADS if heads == config.get("num_attention_heads") else 1
    if kinds := small.get("layer_types"):  # one of each kind, if there are two
        small["layer_types"] = [*dict.fromkeys(kinds), *kinds][:2]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := small.get(key), dict):
            factors = {name: rope[name][: HEAD // 2] for name in ("long_factor", "short_factor") if name in rope}
            sections = {"mrope_section": [HEAD // 4, HEAD // 8, HEAD // 8]} if "mrope_section" in rope else {}
            small[key] = rope | factors | sections
    if "text_config" in small:
        small["text_config"] = shrunk(small["text_config"])
    if vision := small.get("vision_config"):
        small["vision_config"] = _shrunk_tower(vision, small.get("text_config", small)["hidden_size"])
    return small


def _shrunk_tower(config: dict[str, Any], width_of_text: int) -> dict[str, Any]:
    small = {key: min(value, VISION[key]) if key in VISION else value for key, value in config.items()}
    if "out_hidden_size" in small:
        small["out_hidden_size"] = width_of_text
    if "embed_dim" in small:  # Qwen2-VL: embed_dim is the tower's, hidden_size what comes out of it
        small["embed_dim"], small["hidden_size"] = VISION["hidden_size"], width_of_text
    if "deepstack_visual_indexes" in small:
        small["deepstack_visual_indexes"] = [0]
    if "fullatt_block_indexes" in small:
        small["fullatt_block_indexes"] = [1]
    return small


def write_shrunk_model(
    source: str, place: Path, *, hf_config: str | None = None, tokenizer: str | None = None, trust: bool = False
) -> tuple[str, str]:
    """Writes config, random weights, and whatever of the model's folder is not weights.

    Returns:
        What it is, in words, and the attention that it has on a CPU.

    Args:
        source: a model's folder, or a name on the hub, of which config and tokenizer alone are fetched.
        hf_config: folder of another config that the job names.
        tokenizer: folder or name of another tokenizer that the job names.
        trust: whether code that comes with the model may run.

    Raises:
        OSError, ValueError: transformers cannot make such a model.
    """
    import torch
    import transformers

    place.mkdir(parents=True)
    folder = Path(source)
    if folder.is_dir():
        for file in folder.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copy(file, place / file.name)
    else:
        from transformers.utils import cached_file

        transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust).save_pretrained(place)
        shutil.copy(str(cached_file(source, "config.json")), place / "config.json")
    if tokenizer:
        transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust).save_pretrained(place)
    config = json.loads((Path(hf_config) if hf_config else place).joinpath("config.json").read_text())
    (place / "config.json").write_text(json.dumps(shrunk(config), indent=1))
    hf = transformers.AutoConfig.from_pretrained(place, trust_remote_code=trust)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        known = getattr(transformers, hf.architectures[0], None)
        if known is None:  # of code that comes with the model
            model = transformers.AutoModelForCausalLM.from_config(hf, trust_remote_code=trust)
        else:
            model = known(hf)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(place)
    parameters = sum(weight.numel() for weight in model.parameters())
    attention = "sdpa" if model._supports_sdpa else "eager"
    return f"{hf.architectures[0]}, shrunk to {parameters:,} parameters with random weights", attention
