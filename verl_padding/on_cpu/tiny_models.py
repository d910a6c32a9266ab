"""Tiny random models with a byte-level tokenizer, made on first use and without any network."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

TinyModelKind = Literal["qwen2", "qwen3", "qwen3_thinking", "qwen3_moe", "qwen3_vl", "qwen3_5"]
MODEL_TYPES = {"qwen3_thinking": "qwen3", "qwen3_5": "qwen3_5_text"}
"""Kind -> its model_type, where that is another."""
THINKS = ("qwen3_thinking", "qwen3_5")

IMAGE_PATCH = 16  # pixels of a side of a vision model's patch; 2 x 2 patches become one token
IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
"""Setting of a vision model -> the token whose id it is."""
MAX_IMAGE_TOKENS = 16

# Two layers, so that one is behind another; two heads on one key and value head, so that heads are
# grouped.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that other CPU engines accept
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [8, 4, 4],
    "mrope_interleaved": True,
}
OF_KIND: dict[TinyModelKind, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "qwen3_vl": {"rope_parameters": MROPE},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": IMAGE_PATCH,
    "deepstack_visual_indexes": [0],
}

# Qwen's own turn markers, without its default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is "
    "string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if "
    "part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ "
    "part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THINK_TOKENS = ("<think>", "</think>")
# As Qwen3's: what was thought in earlier turns is left out, and a reply begins with a thought.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def make_tiny_model(kind: TinyModelKind, folder: Path, *, seed: int = 0) -> Path:
    """Makes a tiny model in a folder of its own in `folder`, unless it is there already, and
    returns its folder.

    ``qwen3_vl`` sees images and needs the extra ``vision``; the templates of
    ``qwen3_thinking`` and of ``qwen3_5``, a language model alone, leave out what was thought in
    earlier turns. Several processes may ask for the same model.
    """
    place = folder / f"tiny_{kind}_seed{seed}"
    if not place.is_dir():
        try:
            write_tiny_model(kind, place, seed=seed)
        except OSError:
            if not place.is_dir():  # otherwise another process was faster with the same model
                raise
    return place


def write_tiny_model(kind: TinyModelKind, place: Path, *, seed: int = 0) -> None:
    """Writes a model of two layers and about 0.1 million parameters, in transformers' format, in
    float32.

    `place`, its folder, appears complete or not at all, with those above it.

    Raises:
        OSError: `place` is a file or a folder that is not empty, or cannot be written.
    """
    import torch
    import transformers

    sees = kind == "qwen3_vl"
    tokenizer = make_byte_tokenizer(IMAGE_TOKENS.values() if sees else (), thinks=kind in THINKS)
    sizes = SIZES | {
        "vocab_size": len(tokenizer),
        **_special_ids(tokenizer),
        **OF_KIND.get(kind, {}),
    }
    saved: list[Any] = [tokenizer]
    if sees:
        config, processor = _vision_config(sizes, tokenizer)
        saved.insert(0, processor)
        auto_class = transformers.AutoModelForImageTextToText
    else:
        config = transformers.AutoConfig.for_model(MODEL_TYPES.get(kind, kind), **sizes)
        auto_class = transformers.AutoModelForCausalLM
    # the global generator is put back afterwards: a caller's own seed must not depend on this call
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # as drawn, linear attention forgets within some tokens
                torch.nn.init.uniform_(weight, -4, 0)
    # one for each model that is written, however small
    transformers.utils.logging.disable_progress_bar()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}_", dir=place.parent) as draft:
        for part in (model, *saved):
            part.save_pretrained(draft)
        os.chmod(draft, 0o755)  # a temporary folder keeps other users out
        os.rename(draft, place)


def _special_ids(tokenizer: Any) -> dict[str, Any]:
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _vision_config(sizes: dict[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """Config and processor of a model that sees images."""
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config=sizes,
        vision_config=VISION,
        tie_word_embeddings=False,
        **_special_ids(tokenizer),
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()},
    )
    token = (2 * IMAGE_PATCH) ** 2  # pixels of a token
    limits = {"min_pixels": token, "max_pixels": MAX_IMAGE_TOKENS * token}
    images = transformers.Qwen2VLImageProcessor(patch_size=IMAGE_PATCH, **limits)
    # needs torchvision, which is in the extra ``vision``
    videos = transformers.Qwen3VLVideoProcessor()
    template = {"chat_template": CHAT_TEMPLATE}
    return config, transformers.Qwen3VLProcessor(images, tokenizer, videos, **template)


def make_byte_tokenizer(more_tokens: Iterable[str] = (), *, thinks: bool = False) -> Any:
    """A ``PreTrainedTokenizerFast`` of 256 bytes, three markers and `more_tokens`: each byte of a
    text is one token.

    With ``thinks``, the beginning and the end of a thought are tokens, too, and earlier thoughts
    are left out of chats.

    So a conversation that is encoded turn by turn has the same tokens as when it is encoded whole.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([*more_tokens], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    if thinks:
        # not special, as Qwen3's: they are part of a reply's text
        tokenizer.add_tokens([*THINK_TOKENS])
        tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer
