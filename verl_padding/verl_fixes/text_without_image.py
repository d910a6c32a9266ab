"""Micro-batches without an image, for Qwen2-VL and Qwen2.5-VL on FSDP: verl 0.9 stops at the first
one.

verl shows such a micro-batch an image of zeros, times zero, so that the vision tower runs on every
rank; but with transformers 5 the tower answers with an object that has no ``mean``. The check for
cross-contamination sends rows of text alone, so no padded job of these models would start. Here the
tower answers with its features alone, which verl takes for images, too.
"""

import sys
from typing import Any

import torch
from torch import nn

MODULE = "verl.models.transformers.qwen2_vl"
"""verl's workers import it only for models of these two families."""


def give_features_alone(model: Any) -> None:
    """Has the vision tower of a model of these families answer with its features alone."""
    if MODULE in sys.modules and isinstance(model, nn.Module):
        for part in model.modules():
            if isinstance(tower := part._modules.get("visual"), nn.Module):
                tower.register_forward_hook(_features)


def _features(tower: Any, inputs: Any, output: Any) -> torch.Tensor:
    from verl.utils.transformers_compat import unpack_visual_output

    features: torch.Tensor = unpack_visual_output(output)[0]
    return features
