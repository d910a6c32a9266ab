"""Micro-batches without an image, for Qwen2-VL and Qwen2.5-VL on FSDP: verl 0.9 stops at the first
one.

verl shows such a micro-batch an image of zeros, times zero, so that the vision tower runs on every
rank; but with transformers 5 the tower answers with an object that has no ``mean``. The probe for
leaks sends rows of text alone, so no padded job of these models would start. Here the features are
taken out of that object, as verl does for images.
"""

import functools
import sys
from collections.abc import Callable
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
        setattr(families, NAME, with_plain_features(verls))


def with_plain_features(embed: Callable[..., Any]) -> Callable[..., Any]:
    """verl's function, during which the tower answers with its features alone; images have them,
    too."""

    @functools.wraps(embed)
    def get_input_embeds(model: Any, *args: Any, **kwargs: Any) -> Any:
        hook = model.visual.register_forward_hook(_features)
        try:
            return embed(model, *args, **kwargs)
        finally:
            hook.remove()

    return get_input_embeds


def _features(tower: Any, inputs: Any, output: Any) -> torch.Tensor:
    from verl.utils.transformers_compat import unpack_visual_output

    features: torch.Tensor = unpack_visual_output(output)[0]
    return features
