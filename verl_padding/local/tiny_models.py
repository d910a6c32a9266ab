"""Tiny random models with a byte-level tokenizer, made on first use and without any network."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

TinyModelKind = Literal["qwen2", "qwen3", "qwen3_moe"]

# Qwen's own turn markers, without its default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(kind: TinyModelKind, folder: Path, *, seed: int = 0) -> Path:
    """Makes a model of two layers and about 0.1 million parameters, in transformers' format, in float32.

    Args:
        kind: the architecture.
        folder: where models of all kinds and seeds are kept.
        seed: of the weights.

    Returns: the model's own folder inside `folder`. If it is there already, it is returned at once; it
        appears complete or not at all, so several processes may ask for the same model.
    """
    place = folder / f"tiny_{kind}_seed{seed}"
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}_", dir=folder))
    try:
        _write(kind, draft, seed)
        draft.chmod(0o755)  # mkdtemp keeps other users out
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():  # otherwise another process was faster with the same model
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def make_byte_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast`` of 256 bytes and three markers; any text becomes one token a byte.

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
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _write(kind: TinyModelKind, folder: Path, seed: int) -> None:
    import torch
    import transformers

    tokenizer = make_byte_tokenizer()
    shape = {
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
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
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
            case _:
                raise ValueError(f"unknown kind of tiny model: {kind!r}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
