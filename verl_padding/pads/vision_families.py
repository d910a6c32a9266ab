"""The smallest image for a model's vision tower, for models whose tower must run on all ranks if it
runs on one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_padding.errors import PaddingConfigError

Inputs = Mapping[str, torch.Tensor]
"""``multi_modal_inputs`` of a row: name -> tensor."""


@dataclass(frozen=True)
class SmallestImage:
    """A pad's image for the vision tower: its ``multi_modal_inputs``, and their prompt tokens."""

    inputs: dict[str, torch.Tensor]
    token_ids: tuple[int, ...]


def _merged_patches(config: Mapping[str, Any], source: Inputs) -> SmallestImage:
    """Qwen2-VL and Qwen2.5-VL: rows of patches, of which a square of ``spatial_merge_size`` becomes
    one token."""
    merge = int(config["vision_config"]["spatial_merge_size"])
    patches = source["pixel_values"] if "pixel_values" in source else source["pixel_values_videos"]
    tokens = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    return SmallestImage(
        inputs={
            "pixel_values": patches.new_zeros(merge * merge, patches.shape[1]),
            "image_grid_thw": torch.tensor([[1, merge, merge]], dtype=torch.int64),
        },
        token_ids=tuple(int(config[token]) for token in tokens),
    )


def _whole_image(config: Mapping[str, Any], source: Inputs) -> SmallestImage:
    """Gemma 3: whole images of one size, (images, channels, height, width), ``mm_tokens_per_image``
    tokens each."""
    pixels = source["pixel_values"]
    name = "image_token_id" if "image_token_id" in config else "image_token_index"
    begin, end = int(config["boi_token_index"]), int(config["eoi_token_index"])
    return SmallestImage(
        inputs={"pixel_values": pixels.new_zeros(1, *pixels.shape[1:])},
        token_ids=(begin, *[int(config[name])] * int(config["mm_tokens_per_image"]), end),
    )


RUNS_WITHOUT_IMAGES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Model types that verl 0.9 feeds a dummy image where a micro-batch has none
(models/transformers/qwen3_vl.py)."""

SMALLEST: Mapping[str, Callable[[Mapping[str, Any], Inputs], SmallestImage]] = {
    "qwen2_vl": _merged_patches,
    "qwen2_5_vl": _merged_patches,
    "gemma3": _whole_image,
}
"""Model types whose vision tower has to run on every rank -> how their smallest image is made."""


def image_maker(choice: str, config: Mapping[str, Any]) -> Callable[[Inputs], SmallestImage] | None:
    """A function that makes the image of pads from ``multi_modal_inputs`` of a real row with one;
    None if pads need no image.

    ``choice`` is a value of ``padding.multimodal``, ``config`` the model's Hugging Face config. An
    unknown model type raises a PaddingConfigError.
    """
    model_type = str(config.get("model_type"))
    if choice == "empty" or (choice == "auto" and model_type in RUNS_WITHOUT_IMAGES):
        return None
    if model_type not in SMALLEST:
        raise PaddingConfigError(
            f"padding.multimodal={choice!r}: the smallest image of model type {model_type!r} is "
            f"unknown (known: {', '.join(sorted(SMALLEST))}). Set padding.multimodal=empty if the "
            "model can run on text alone on some ranks and with images on others, or if no row of "
            "the job has images."
        )
    return partial(SMALLEST[model_type], config)
