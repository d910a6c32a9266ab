"""Tokens that rows share are computed once in verl's FSDP engines, which get the segments of a
micro-batch alone.

A causal model's output at a position depends on the tokens up to it, so rows that begin alike have
the same outputs up to where they part. The engine's inputs are made from the segments of the rows'
tree (:mod:`~verl_padding.prefix_sharing.tree`), and every output is expanded to all rows of the
micro-batch before loss, metrics or driver see it; backward adds up the gradients of all branches.
verl 0.9 has no place for this: its engines make inputs and outputs in two methods, which this
module wraps in the class of a worker's engine, until verl shares prefixes by itself
(tests/prefix_sharing/test_engine.py).

The last output of a row belongs to whatever token comes next. Shared, it is another one than alone,
and nothing reads it.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingError
from verl_padding.job.blocker import Blocker
from verl_padding.pads.columns import DFS_POSITION, read_column
from verl_padding.plan.forest import Forest
from verl_padding.prefix_sharing.attention import GatherTokens, attention_layers, patch_attention
from verl_padding.prefix_sharing.linear_attention import (
    CONVOLUTION,
    RULE,
    linear_layers,
    patch_linear_attention,
)
from verl_padding.prefix_sharing.row_inputs import PER_TOKEN, TOKENS, RowInputs
from verl_padding.prefix_sharing.tree import TREE, PrefixTree, build_tree, tree_of, tree_of_rows

SHARES = "_verl_padding_shares"
"""Attribute of an engine's method that is wrapped already."""
ACTIVE_TREE = "_verl_padding_tree"
"""Attribute of an engine: the tree that its attention follows, until the backward pass has
ended."""
KEEPS_APART = "_verl_padding_keeps_apart"
"""Attribute of an engine whose linear attention takes packed rows one by one."""
SEGMENTS = "computed_segments"
"""Key of what an engine keeps of a micro-batch's inputs for its outputs: the segments, selected
once."""


class BranchesMixedError(PaddingError):
    """Some layers of a model have not attended to the paths of a tree, so tokens of one branch have
    seen another."""


def find_tree(data: TensorDict, *, branches: bool) -> PrefixTree:
    """The tree of a micro-batch's rows, each compared with the row before it: a plan that was wrong
    about them costs time alone.

    Pads are computed as they are, as they were planned.

    Args:
        data: a micro-batch, on the CPU; without :data:`DFS_POSITION`, its rows are sorted by their
            tokens.
        branches: whether rows share tokens before they part; if not, a row shares all of itself or
            nothing.
    """
    inputs = RowInputs(data)
    if DFS_POSITION in data:
        position_R = read_column(data, DFS_POSITION).tolist()
    else:
        position_R = Forest.from_tokens(inputs.ids_R).dfs_position_R.tolist()
    order = sorted(range(len(data)), key=position_R.__getitem__)
    # What sees an image may see more than what is before it: a mask of the model's says so, which
    # trees leave out.
    branches = branches and not any(inputs.images_R)
    lengths_R = [len(ids) for ids in inputs.ids_R]
    shared_I = [0] * len(order)
    for place, (before, row) in enumerate(pairwise(order), 1):
        shared = inputs.shared(before, row) if position_R[row] >= 0 else 0
        if branches or shared == lengths_R[row]:
            shared_I[place] = shared
    return build_tree(lengths_R, order, shared_I)


def engine_blockers(engine: Any) -> Iterator[Blocker]:
    """What of an engine is not as verl 0.9's FSDP engines have it, so that its rows cannot
    share."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    cls = type(engine)
    # Rows are compared by what verl's own methods read of them: those of another engine may read
    # more.
    for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step"):
        # The module that Python, or functools.wraps, has written on it.
        own: Any = getattr(cls, name, None)
        if getattr(inspect.unwrap(own), "__module__", None) != FSDPEngineWithLMHead.__module__:
            yield Blocker(
                f"engine={cls.__name__}",
                f"it has a {name} of its own, not that of verl's FSDP engines, and may read fields "
                "of rows that are not compared before rows share",
                f"Put functools.wraps(FSDPEngineWithLMHead.{name}) on it if it reads no others, or "
                "set padding.sharing=off.",
            )


def share_in(engine: Any) -> None:
    """Makes the class of an engine that nothing blocks compute the segments of its micro-batches
    alone."""
    _wrap_methods(type(engine))
    patch_attention()


def keep_rows_apart(engine: Any) -> None:
    """Has the linear attention of an engine's model, if there is any, take packed rows one by
    one."""
    if patch_linear_attention(engine.module):
        setattr(engine, KEEPS_APART, True)
        _wrap_methods(type(engine))


def _wrap_methods(cls: type[Any]) -> None:
    # Each by itself: the engine of a critic inherits one of them from that of an actor, which may
    # be wrapped already.
    wraps: dict[str, Callable[..., Any]] = {
        "prepare_model_inputs": _wrap_prepare_inputs,
        "prepare_model_outputs": _wrap_prepare_outputs,
        "forward_backward_batch": _with_tree_released,
    }
    for name, wrap in wraps.items():
        method = getattr(cls, name)
        if not hasattr(method, SHARES):
            wrapped = wrap(method)
            setattr(wrapped, SHARES, True)
            setattr(cls, name, wrapped)


def segments_of(micro_batch: TensorDict, tree: PrefixTree) -> TensorDict:
    """The rows of a tree's segments, of which the fields with a value per token begin where the
    segment does."""
    segments = tu.index_select_tensor_dict(micro_batch, tree.tip_S)
    segments.pop(TREE)  # a micro-batch with nothing to share
    if not tree.branches:
        return segments
    # A row of five tokens whose segment begins at the third has the last three of each field.
    offsets = torch.tensor([0, *accumulate(tree.lengths_S)])
    for name in (TOKENS, *PER_TOKEN):
        if name not in segments:
            continue
        # (tokens, ..), and position ids (.., tokens)
        dim = -1 if name == "position_ids" else 0
        rows = zip(segments[name].unbind(), tree.start_S, tree.lengths_S, strict=True)
        parts = [row.narrow(dim, start, length) for row, start, length in rows]
        segments[name] = torch.nested.nested_tensor_from_jagged(
            torch.cat(parts, dim),
            offsets.to(parts[0].device),
            jagged_dim=parts[0].ndim if dim == -1 else 1,
        )
    return segments


def _activate_tree(engine: Any, micro_batch: TensorDict | None) -> None:
    """Has the layers of an engine's model follow the tree of a micro-batch; None for no tree.

    Attention follows one that branches, and tells other rows apart by itself; linear attention
    follows any, and that of rows that share nothing.
    """
    tree = None if micro_batch is None else tree_of(micro_batch)
    branching = tree if tree is not None and tree.branches else None
    if branching is not getattr(engine, ACTIVE_TREE, None):
        setattr(engine, ACTIVE_TREE, branching)
        for layer in attention_layers(engine.module):
            setattr(layer, TREE, branching)
    # verl's engines make their model anew when they are reset.
    layers = patch_linear_attention(engine.module) if hasattr(engine, KEEPS_APART) else []
    if layers and micro_batch is not None and tree is None:
        tree = tree_of_rows(micro_batch[TOKENS].offsets().diff().tolist())
    for layer in layers:
        setattr(layer, TREE, tree)


def _with_tree_released(run: Callable[..., Any]) -> Callable[..., Any]:
    # Layers that are checkpointed follow a tree again in the backward pass, so it lasts until the
    # call ends.
    @functools.wraps(run)
    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        finally:
            _activate_tree(self, None)

    return forward_backward_batch


def _wrap_prepare_inputs(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: TensorDict) -> Any:
        tree = tree_of(micro_batch)
        _activate_tree(self, micro_batch)
        if tree is None:
            return prepare(self, micro_batch=micro_batch)
        segments = segments_of(micro_batch, tree)
        inputs, output_args = prepare(self, micro_batch=segments)
        output_args[SEGMENTS] = segments
        return inputs, output_args

    return prepare_model_inputs


def _wrap_prepare_outputs(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_model_outputs(
        self: Any,
        output: Any,
        output_args: Any,
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, Any]:
        tree = tree_of(micro_batch)
        computed = micro_batch if tree is None else output_args[SEGMENTS]
        outputs: dict[str, Any] = prepare(
            self, output, output_args, computed, logits_processor_func
        )
        if tree is None:
            return outputs
        if tree.branches:
            _check_all_layers_attended(self, tree)
        offsets = micro_batch["input_ids"].offsets()

        def expand(name: str, of_segments: Any) -> torch.Tensor:
            is_nested = isinstance(of_segments, torch.Tensor) and of_segments.is_nested
            if not is_nested or of_segments.offsets().diff().tolist() != tree.lengths_S:
                raise PaddingError(
                    f"padding.sharing: {type(self).__name__}'s {name!r} must be nested, with a "
                    f"value for each token that is computed ({tree.lengths_S}): anything else of "
                    "a row is not that of another row. Set padding.sharing=off."
                )
            values = of_segments.values()
            expanded = GatherTokens.apply(values, 0, tree.row_places.to(values.device))
            return torch.nested.nested_tensor_from_jagged(expanded, offsets)

        return {
            name: None if value is None else expand(name, value) for name, value in outputs.items()
        }

    return prepare_model_outputs


def _check_all_layers_attended(engine: Any, tree: PrefixTree) -> None:
    config = engine.module.config.get_text_config()
    mixers: dict[int, set[Any]]
    mixers = {id(layer): {id(layer)} for layer in attention_layers(engine.module)}
    for layer in linear_layers(engine.module):
        mixers[id(layer)] = {(id(layer), CONVOLUTION), (id(layer), RULE)}
    followed = [each for each in mixers.values() if each <= tree.attended]
    if not len(followed) == len(mixers) == config.num_hidden_layers:
        raise BranchesMixedError(
            f"padding.sharing='on': {len(followed)} of {config.num_hidden_layers} "
            "layers have attended to the paths of rows that part "
            f"(model_type={config.model_type}, "
            f"attn_implementation={config._attn_implementation}): the others mix branches. Set "
            "padding.sharing=off."
        )
