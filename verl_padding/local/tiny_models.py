"""Tiny random models with a byte-level tokenizer, made on first use and without any network."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

TinyModelKind = Literal["qwen2", "qwen3", "qwen3_moe", "qwen3_vl"]

IMAGE_PATCH = 16
"""Pixels of a side of a vision model's patch; 2 x 2 patches become one token."""
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
MOST_IMAGE_TOKENS = 16

# Qwen's own turn markers, without its default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(kind: TinyModelKind, folder: Path, *, seed: int = 0) -> Path:
    """Makes a tiny model in its own folder inside `folder`, which it returns, unless it is there already.

    ``qwen3_vl`` sees images and needs the extra ``vision``. Several processes may ask for the same model.
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
    """Writes a model of two layers and about 0.1 million parameters, in transformers' format, in float32.

    Args:
        place: the model's folder, which appears complete or not at all. Folders above it are made too.

    Raises:
        OSError: `place` is a file or a folder that is not empty, or cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}_", dir=place.parent))
    try:
        _write(kind, draft, seed)
        draft.chmod(0o755)  # mkdtemp keeps other users out
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def make_byte_tokenizer(more_tokens: Sequence[str] = ()) -> Any:
    """A ``PreTrainedTokenizerFast`` of 256 bytes, three markers and `more_tokens`: each byte of a text is one token.

    No two bytes ever merge, so the tokens of a text are the tokens of its parts: encoding a conversation
    turn by turn gives the same tokens as encoding it whole.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
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
    return tokenizer


def _write(kind: TinyModelKind, folder: Path, seed: int) -> None:
    import torch
    import transformers

    tokenizer = make_byte_tokenizer(IMAGE_TOKENS if kind == "qwen3_vl" else ())
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # head_dim 32 is what Qwen2 gets from 64 / 2, and the least that other CPU engines accept
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    # the global generator is put back afterwards: a caller's own seed must not depend on this call
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        match kind:
            case "qwen2":
                model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
            case "qwen3":
                model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=32))
            case "qwen3_moe":
                config = transformers.Qwen3MoeConfig(**shape, head_dim=32, **experts)
                model = transformers.Qwen3MoeForCausalLM(config)
            case "qwen3_vl":
                model = transformers.Qwen3VLForConditionalGeneration(_vision_config(shape, tokenizer))
                _image_processor(tokenizer).save_pretrained(folder)
            case _:
                raise ValueError(f"unknown kind of tiny model: {kind!r}")
    transformers.utils.logging.disable_progress_bar()  # one for each model that is written, however small
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _vision_config(shape: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    tokens = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    return Qwen3VLConfig(
        text_config=shape | {"head_dim": 32, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": shape["hidden_size"],
            "patch_size": IMAGE_PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **dict(zip(tokens, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True)),
        **{name: shape[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _image_processor(tokenizer: Any) -> Any:
    """Needs torchvision, as Qwen's processors do: it is in the extra ``vision``."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    token = (2 * IMAGE_PATCH) ** 2  # pixels of a token
    images = Qwen2VLImageProcessor(patch_size=IMAGE_PATCH, min_pixels=token, max_pixels=MOST_IMAGE_TOKENS * token)
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE)
