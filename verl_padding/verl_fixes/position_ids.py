"""Position ids of M-RoPE where all rows of a rank have one length: verl 0.9 cuts them off, or its
worker stops.

TransferQueue packs the (4, tokens) ids of rows as a jagged tensor, ragged in the dimension in which
they differ. If they do not differ, as on a rank with a single row, the tensor is ragged in the
first dimension, and verl's ``maybe_fix_3d_position_ids`` declares it ragged in the second without
moving a value. Two rows of lengths 3 and 3:

    came as      (8, 3), the 4 axes of row 0 above those of row 1
    verl has     (8, 3), read as 8 axes of rows that share 3 tokens
    repaired     (4, 6), the tokens of row 0 beside those of row 1
"""

import sys

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

NAME = "maybe_fix_3d_position_ids"


def fix_all_position_ids() -> None:
    """Puts ours in the place of verl's, in all modules of this process that have it."""
    verls = getattr(tu, NAME)
    for module in [*sys.modules.values()]:
        if module is not tu and vars(module).get(NAME) is verls:
            setattr(module, NAME, fix_3d_position_ids)


def fix_3d_position_ids(data: TensorDict) -> None:
    """Makes position ids (B, axes, tokens) ragged in their tokens, whatever they came as; others
    are left alone."""
    ids = data.get("position_ids", None)
    if ids is None or not ids.is_nested or ids.dim() != 3:
        return
    values, token_offsets = ids.values(), data["input_ids"].offsets()
    # An update's ids are fixed up to three times, and their own sizes do not tell whether they were
    # before: (4, 4) may be two rows of four axes and two tokens side by side, or of two axes and
    # four tokens one below the other.
    if values.shape[1] == token_offsets[-1] and torch.equal(ids.offsets(), token_offsets):
        ids._ragged_idx = 2  # verl's own fix: tensordict loses this when it is pickled
        return
    rows = values.unflatten(0, (len(data), -1))  # (B * axes, tokens), one row below the other
    data["position_ids"] = tu.nested_tensor_from_tensor_list(list(rows), ragged_idx=2)
