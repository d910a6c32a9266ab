"""Position ids of M-RoPE in verl's workers, where all rows of a rank have one length.

TransferQueue packs the (4, L) ids of rows as a jagged tensor, ragged in the dimension in which they differ. If they do
not differ, as on a rank with only pads or a single row, the tensor is ragged in the first dimension, and verl 0.9's
``maybe_fix_3d_position_ids`` declares it ragged in the second without moving a value: ids are cut off, or the
worker stops. This module replaces that function where verl's workers and engines use it, for vision models
only. It can go when verl packs such rows correctly; tests/worker/test_position_ids.py says when.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

PATCHED = "maybe_fix_3d_position_ids"
MODULES = ("verl.workers.engine_workers", "verl.workers.engine.base")


def fix_3d_position_ids(data: TensorDict) -> None:
    """Makes position ids (B, axes, tokens) ragged in their tokens, whatever they came as; others are left alone.

    Raises:
        KeyError: the rows have such position ids, but no ``input_ids``; no model of verl runs on those.
    """
    if "position_ids" not in data.keys():  # noqa: SIM118  (a TensorDict)
        return
    ids = data["position_ids"]
    if not ids.is_nested or ids.dim() != 3:
        return
    values, token_offsets = ids.values(), data["input_ids"].offsets()
    # An update's ids are fixed up to three times, and their own sizes do not tell whether they were before: (4, 4) may
    # be two rows of four axes and two tokens side by side, or of two axes and four tokens one below the other.
    if values.shape[1] == token_offsets[-1] and torch.equal(ids.offsets(), token_offsets):
        ids._ragged_idx = 2  # verl's own fix: tensordict loses this when it is pickled
        return
    rows = values.unflatten(0, (len(data), -1))  # (B * axes, L), one row below the other
    data["position_ids"] = tu.nested_tensor_from_tensor_list(list(rows), ragged_idx=2)


def install_in_worker(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: makes a worker's process use the function above."""
    from verl.protocol import DataProto

    for name in MODULES:
        module = importlib.import_module(name)
        assert hasattr(module, PATCHED), f"{name} has no {PATCHED} to replace"
        setattr(module, PATCHED, fix_3d_position_ids)
    return DataProto()
