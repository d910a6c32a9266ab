"""Micro-batches without an image, for Qwen2-VL and Qwen2.5-VL in verl's FSDP workers.

verl 0.9 shows such a micro-batch an image of zeros, times zero, so that the vision tower runs on every rank; but with
transformers 5 the tower answers with an object that has no ``mean``, and the job stops at the first micro-batch of text
alone, so sessions that have an image only in their first turn cannot train. This module takes the features out of that
object, as verl's own function does for real images. It can go when verl does so for zeros too;
tests/worker/test_text_rows.py says when.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

MODULE = "verl.models.transformers.qwen2_vl"
"""verl's workers import it only for models of these two families."""
REPLACED = "_get_input_embeds"


def embeds_of_text(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Turns token ids (1, T) into their embeddings (1, T, hidden), to which the vision tower adds a zero."""
    from verl.utils.transformers_compat import unpack_visual_output

    embeds = model.get_input_embeddings()(input_ids)
    config = model.config.vision_config
    side = config.spatial_merge_size
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    features, _ = unpack_visual_output(
        model.visual(
            embeds.new_zeros(side * side, patch, dtype=model.visual.dtype),
            grid_thw=torch.tensor([[1, side, side]], device=embeds.device),
        )
    )
    return embeds + 0.0 * features.mean().to(embeds)


def install_in_worker(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: lets a worker of these families run on text alone."""
    from verl.protocol import DataProto

    module = sys.modules.get(MODULE)
    if module is None or hasattr(own := getattr(module, REPLACED), "verls_own"):
        return DataProto()

    def get_input_embeds(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        *grids: Any,
        **named_grids: Any,
    ) -> Any:
        if pixel_values is None and pixel_values_videos is None:
            return embeds_of_text(model, input_ids), attention_mask
        return own(model, input_ids, attention_mask, pixel_values, pixel_values_videos, *grids, **named_grids)

    get_input_embeds.verls_own = own  # type: ignore[attr-defined]
    setattr(module, REPLACED, get_input_embeds)
    return DataProto()
