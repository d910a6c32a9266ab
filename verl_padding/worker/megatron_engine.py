"""Tokens that rows share are computed once in verl's Megatron engines.

verl makes everything of a micro-batch in ``forward_step``: labels, temperatures, the packed buffer,
the routes of experts. It gets the segments here, and the rows come back right before the loss.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import nn
from verl.utils.device import get_device_id

from verl_padding.prefix_sharing.engine import expand_outputs, segments_of
from verl_padding.prefix_sharing.row_inputs import TOKENS
from verl_padding.prefix_sharing.tree import tree_of

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine as VerlEngine
else:
    VerlEngine = object  # a mixin: one of verl's engines comes behind it


class MegatronSharingEngine(VerlEngine):
    """Mixin before one of verl's Megatron engines, whose forward steps get the segments of
    micro-batches with a tree, and whose losses their rows."""

    may_branch = False
    """Whether its attention follows the paths of rows that part."""

    def forward_step(
        self, batch_iter: Iterator[TensorDict], model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        rows = next(batch_iter)
        if (tree := tree_of(rows)) is None:
            return super().forward_step(iter([rows]), model, *args, **kwargs)
        segments = segments_of(rows, tree)
        output, postprocess = super().forward_step(iter([segments]), model, *args, **kwargs)
        # The last stage calls it with an output; verl has put the segments into it.
        return output, partial(postprocess, data=rows.to(get_device_id()))

    def prepare_model_outputs(self, output: Any, data: TensorDict) -> dict[str, Any]:
        outputs: dict[str, Any] = super().prepare_model_outputs(output, data)
        if (tree := tree_of(data)) is None:
            return outputs
        return expand_outputs(self, outputs, tree, data[TOKENS].offsets())
