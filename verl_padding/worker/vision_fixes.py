"""Two functions of verl 0.9 that batches of any size make fail with vision models, replaced in its workers.

**Position ids of M-RoPE where all rows of a rank have one length.** TransferQueue packs the (4, L) ids of rows as a
jagged tensor, ragged in the dimension in which they differ. If they do not differ, as on a rank with only pads or a
single row, the tensor is ragged in the first dimension, and verl's ``maybe_fix_3d_position_ids`` declares it ragged in
the second without moving a value: ids are cut off, or the worker stops.

**Micro-batches without an image, for Qwen2-VL and Qwen2.5-VL on FSDP.** verl shows such a micro-batch an image of
zeros, times zero, so that the vision tower runs on every rank; but with transformers 5 the tower answers with an object
that has no ``mean``, and the job stops at the first micro-batch of text alone. Here the features are taken out of that
object, as verl's own function does for real images. tests/worker/test_vision_fixes.py says when each can go.
"""

import functools
import importlib
import inspect
import sys
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.worker.training_workers import for_training_workers

FIXED_IDS = "maybe_fix_3d_position_ids"
IDS_MODULES = ("verl.workers.engine_workers", "verl.workers.engine.base")
EMBEDS = "_get_input_embeds"
EMBEDS_MODULE = "verl.models.transformers.qwen2_vl"
"""verl's workers import it only for models of these two families."""


@for_training_workers
def install_in_worker(role: str, trainee: Any) -> None:
    """For verl's ``execute_with_func_generator``: replaces both functions in a worker's process."""
    for name in IDS_MODULES:
        module = importlib.import_module(name)
        assert hasattr(module, FIXED_IDS), f"{name} has no {FIXED_IDS} to replace"
        setattr(module, FIXED_IDS, fix_3d_position_ids)
    families = sys.modules.get(EMBEDS_MODULE)
    if families is not None and not hasattr(own := getattr(families, EMBEDS), "__wrapped__"):
        setattr(families, EMBEDS, _with_text_alone(own))


def fix_3d_position_ids(data: TensorDict) -> None:
    """Makes position ids (B, axes, tokens) ragged in their tokens, whatever they came as; others are left alone."""
    ids = data.get("position_ids", None)
    if ids is None or not ids.is_nested or ids.dim() != 3:
        return
    values, token_offsets = ids.values(), data["input_ids"].offsets()
    # An update's ids are fixed up to three times, and their own sizes do not tell whether they were before: (4, 4) may
    # be two rows of four axes and two tokens side by side, or of two axes and four tokens one below the other.
    if values.shape[1] == token_offsets[-1] and torch.equal(ids.offsets(), token_offsets):
        ids._ragged_idx = 2  # verl's own fix: tensordict loses this when it is pickled
        return
    rows = values.unflatten(0, (len(data), -1))  # (B * axes, L), one row below the other
    data["position_ids"] = tu.nested_tensor_from_tensor_list(list(rows), ragged_idx=2)


def embeds_of_text(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Turns token ids (1, T) into their embeddings (1, T, hidden), to which the vision tower adds a zero."""
    from verl.utils.transformers_compat import unpack_visual_output

    embeds = model.get_input_embeddings()(input_ids)
    config, dtype = model.config.vision_config, model.visual.dtype
    side = config.spatial_merge_size
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=embeds.device)
    features, _ = unpack_visual_output(model.visual(embeds.new_zeros(side * side, patch, dtype=dtype), grid_thw=grid))
    return embeds + 0.0 * features.mean().to(embeds)


def _with_text_alone(own: Any) -> Any:
    parameters = inspect.signature(own)

    @functools.wraps(own)
    def get_input_embeds(*args: Any, **kwargs: Any) -> Any:
        of = parameters.bind(*args, **kwargs).arguments
        if of.get("pixel_values") is None and of.get("pixel_values_videos") is None:
            return embeds_of_text(of["model"], of["input_ids"]), of.get("attention_mask")
        return own(*args, **kwargs)

    return get_input_embeds
