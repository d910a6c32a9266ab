"""torchvision beside a torch without CUDA: the package index has a CUDA build, whose library does not load there.

The Python part of torchvision then fails on import, because it decorates two operators that only the library declares.
Image processors need neither of them.
"""

from typing import Any

import torch

_DECLARATIONS: list[torch.library.Library] = []  # they last as long as they are held

MISSING = ("nms", "qnms")


def declare_missing_ops(extension: Any) -> None:
    """For a post-import hook on ``torchvision.extension``, which has just tried to load the library.

    Nothing happens if the library was loaded. The operators declared here have no implementation: calling one raises.
    """
    if extension._has_ops():
        return
    declarations = torch.library.Library("torchvision", "FRAGMENT")
    for name in MISSING:
        declarations.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARATIONS.append(declarations)
