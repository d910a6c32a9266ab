"""Micro-batches without an image, for Qwen2-VL and Qwen2.5-VL on FSDP: verl 0.9 stops at the first
one.

verl shows such a micro-batch an image of zeros, times zero, so that the vision tower runs on every
rank; but with transformers 5 the tower answers with an object that has no ``mean``. The probe for
leaks sends rows of text alone, so no padded job of these models would start. Here the features are
taken out of that object, as verl does for images.
"""

import functools
import inspect
import sys
from typing import Any

import torch

from verl_padding.worker.training_workers import for_training_workers

NAME = "_get_input_embeds"
MODULE = "verl.models.transformers.qwen2_vl"
"""verl's workers import it only for models of these two families."""


@for_training_workers
def install_in_worker(role: str, training_worker: Any) -> None:
    """For verl's ``execute_with_func_generator``."""
    families = sys.modules.get(MODULE)
    if families is not None and not hasattr(verls := getattr(families, NAME), "__wrapped__"):
        setattr(families, NAME, _with_text_alone(verls))


def embed_text(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Turns token ids (1, T) into their embeddings (1, T, hidden), to which the vision tower adds a
    zero."""
    from verl.utils.transformers_compat import unpack_visual_output

    embeds = model.get_input_embeddings()(input_ids)
    config, dtype = model.config.vision_config, model.visual.dtype
    side = config.spatial_merge_size
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=embeds.device)
    image = embeds.new_zeros(side * side, patch, dtype=dtype)
    features, _ = unpack_visual_output(model.visual(image, grid_thw=grid))
    return embeds + 0.0 * features.mean().to(embeds)


def _with_text_alone(verls: Any) -> Any:
    signature = inspect.signature(verls)

    @functools.wraps(verls)
    def get_input_embeds(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("pixel_values") is None and given.get("pixel_values_videos") is None:
            return embed_text(given["model"], given["input_ids"]), given.get("attention_mask")
        return verls(*args, **kwargs)

    return get_input_embeds
