"""verl on a CPU, without a network: platform, rollouts, tiny models, and the dry run of a job.

May import: errors, job, pads, plan, record, worker.
"""

from typing import Any

from wrapt import register_post_import_hook

_DECLARATIONS: list[Any] = []  # they last as long as they are held


def _declare_missing_ops(extension: Any) -> None:
    """Lets torchvision be imported beside a torch without CUDA: the package index has a CUDA build
    of it.

    Its library does not load there, and its Python part then fails on import, since it decorates
    two operators that only the library declares. Image processors need neither. Those declared here
    have no implementation.
    """
    if not extension._has_ops():
        import torch

        declarations = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declarations.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        _DECLARATIONS.append(declarations)


# Before anything imports torchvision: transformers does so by itself wherever it is installed.
register_post_import_hook(_declare_missing_ops, "torchvision.extension")
