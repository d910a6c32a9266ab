"""Tiny vision models of four families, and rows with and without images for them."""

from uuid import uuid4

import torch
import transformers

from tests.support.rows_in_queue import put_rows
from verl_padding.on_cpu.tiny_models import make_byte_tokenizer

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
IMAGE_SIDE = 28  # pixels of a side, for the family that takes whole images


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
OF_QWEN = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64}
VISION = {
    "qwen2_vl": OF_QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14},
    "qwen2_5_vl": OF_QWEN
    | SMALL
    | {"out_hidden_size": 64, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    "qwen3_vl": OF_QWEN
    | SMALL
    | {"out_hidden_size": 64, "patch_size": 16, "num_position_embeddings": 64}
    | {"deepstack_visual_indexes": [0]},
    "gemma3": SMALL
    | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": IMAGE_SIDE}
    | {"patch_size": 14},
}
KINDS = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration),
}


def make_vision_model(family, folder):
    """A random model of two text and two vision layers, with the byte tokenizer and a few ids for
    images behind it."""
    tokenizer = make_byte_tokenizer()
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    start, image, end, video = tokenizer.convert_tokens_to_ids(names)
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = special | TEXT | {"vocab_size": len(tokenizer)}
    if family == "gemma3":
        text |= {"head_dim": 16, "sliding_window": 512}
        ids = {"mm_tokens_per_image": 4, "boi_token_index": start, "eoi_token_index": end}
        # Tied, as Google's are: untied, verl's FSDP2 wrapping shards the vision tower's embedding
        # twice.
        ids |= {"image_token_index": image, "tie_word_embeddings": True}
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        if family == "qwen3_vl":
            text["head_dim"], rope["mrope_interleaved"] = 16, True
        text["rope_parameters"] = rope
        ids = {"image_token_id": image, "video_token_id": video, "tie_word_embeddings": False}
        ids |= {"vision_start_token_id": start, "vision_end_token_id": end}
    make_config, make_model = KINDS[family]
    config = make_config(text_config=text, vision_config=VISION[family], **special | ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def put_vision_rows(family, config, images):
    """One session a prompt; each of its rows begins with the whole row before it, and may bring one
    more image.

    An image has 4 x 4 patches, or is a whole one; positions are of the family's rank.

    Args:
        images: for each session, whether each of its turns brings an image.
    """
    draw = torch.Generator().manual_seed(0)
    keys, rows = [], []
    for session, with_image in enumerate(images):
        uid, context, seen = uuid4().hex, torch.randint(5, 200, (4 + session,), generator=draw), {}
        for turn, brings_image in enumerate(with_image):
            if brings_image:
                inputs, image_ids = _image(family, config, draw)
                seen = {
                    name: torch.cat([seen[name], value]) if seen else value
                    for name, value in inputs.items()
                }
                context = torch.cat([context, torch.tensor(image_ids)])
            context = torch.cat([context, torch.randint(5, 200, (2,), generator=draw)])
            response = torch.randint(5, 200, (3,), generator=draw)
            keys.append(f"{uid}_0_{turn}")
            rows.append((context, response, dict(seen)))
            context = torch.cat([context, response])
    whole = [torch.cat([prompt, response]) for prompt, response, _ in rows]
    positions = [torch.arange(len(ids)) for ids in whole]
    return put_rows(
        [(len(prompt), len(response)) for prompt, response, _ in rows],
        keys,
        prompts=[prompt for prompt, _, _ in rows],
        responses=[response for _, response, _ in rows],
        input_ids=whole,
        position_ids=positions
        if family == "gemma3"
        else [ids.expand(4, -1).clone() for ids in positions],
        multi_modal_inputs=[inputs for _, _, inputs in rows],
    )


def _image(family, config, draw):
    if family == "gemma3":
        ids = [
            config["boi_token_index"],
            *[config["image_token_index"]] * 4,
            config["eoi_token_index"],
        ]
        return {"pixel_values": torch.randn(1, 3, IMAGE_SIDE, IMAGE_SIDE, generator=draw)}, ids
    dimension = (
        3
        * config["vision_config"]["temporal_patch_size"]
        * config["vision_config"]["patch_size"] ** 2
    )
    ids = [
        config["vision_start_token_id"],
        *[config["image_token_id"]] * 4,
        config["vision_end_token_id"],
    ]
    return {
        "pixel_values": torch.randn(16, dimension, generator=draw),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }, ids
