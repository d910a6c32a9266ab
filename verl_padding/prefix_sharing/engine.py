"""Tokens that rows share are computed once in verl's engines, which get the segments of a
micro-batch alone: here for those of FSDP and VeOmni, for Megatron's in
``worker/megatron_engine.py``.

A causal model's output at a position depends on the tokens up to it, so rows that begin alike have
the same outputs up to where they branch. The engine's inputs are made from the segments of the
rows' trie (:mod:`~verl_padding.prefix_sharing.prefix_trie`), and every output is expanded to all
rows of the micro-batch before loss, metrics or driver see it; backward adds up the gradients of all
branches.

The last output of a row belongs to whatever token comes next. Shared, it is another one than alone,
and nothing reads it.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import Incompatibility, PaddingError
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.prefix_sharing.attention import (
    GatherTokens,
    attention_layers,
    patch_attention,
    patch_veomni_attention,
)
from verl_padding.prefix_sharing.linear_attention import (
    CONVOLUTION,
    RULE,
    linear_layers,
    patch_linear_attention,
)
from verl_padding.prefix_sharing.prefix_trie import (
    TRIE,
    PrefixTrie,
    build_trie,
    trie_of,
    trie_of_rows,
)
from verl_padding.prefix_sharing.row_inputs import INPUT_IDS, PER_TOKEN, RowInputs

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine as VerlEngine
else:
    VerlEngine = object  # a mixin: one of verl's engines comes behind it

MEGATRON = "verl.workers.engine.megatron.transformer_impl"
VERLS_ENGINES = tuple(
    MEGATRON.replace("megatron", engine) for engine in ("fsdp", "megatron", "veomni")
)
"""Modules of verl whose engines share."""
READ_ROWS = (
    "prepare_model_inputs",
    "prepare_model_outputs",
    "forward_step",
    # Megatron's
    "postprocess_micro_batch_func",
    "_lm_head_logits_processor",
)
"""Methods of engines that read fields of rows."""
SEGMENTS = "computed_segments"
"""Key of what an engine keeps of a micro-batch's inputs for its outputs: the segments, selected
once."""


class BranchesMixedError(PaddingError):
    """Some layers of a model have not attended to the paths of a trie, so tokens of one branch have
    seen another."""


def find_trie(data: TensorDict, *, may_branch: bool, position_R: Sequence[int] = ()) -> PrefixTrie:
    """The trie of a micro-batch's rows, each compared with the row before it: a plan that was wrong
    about them costs time alone.

    Pads are computed as they are, as they were planned.

    Args:
        data: a micro-batch, on the CPU.
        may_branch: whether rows share tokens before they branch; if not, only full prefixes.
        position_R: place of each row, so that one shares most with the one before it; -1 for a pad.
            Without it, rows are sorted by their tokens.
    """
    inputs = RowInputs(data)
    if not position_R:
        position_R = PrefixTries.from_tokens(inputs.ids_R).dfs_position_R.tolist()
    order = sorted(range(len(data)), key=position_R.__getitem__)
    # What sees an image may see more than what is before it: a mask of the model's says so, which
    # tries leave out.
    may_branch = may_branch and not any(inputs.images_R)
    lengths_R = [len(ids) for ids in inputs.ids_R]
    shared_I = [0] * len(order)
    for place, (before, row) in enumerate(pairwise(order), 1):
        shared = inputs.shared(before, row) if position_R[row] >= 0 else 0
        if may_branch or shared == lengths_R[row]:
            shared_I[place] = shared
    return build_trie(lengths_R, order, shared_I)


def engine_incompatibilities(engine: Any) -> Iterator[Incompatibility]:
    """What of an engine is not as verl 0.9's engines have it, so that its rows cannot share."""
    stock = type(engine).stock
    verls = next((cls for cls in stock.__mro__ if cls.__module__ in VERLS_ENGINES), stock)
    # Rows are compared by what verl's own methods read of them: those of another engine may read
    # more.
    for name in READ_ROWS:
        # The module that Python, or functools.wraps, has written on it.
        own: Any = getattr(stock, name, None)
        if own and inspect.unwrap(own).__module__ not in VERLS_ENGINES:
            yield Incompatibility(
                f"engine={stock.__name__}",
                f"its {name} is not verl's, and may read fields that are not compared before rows "
                "share",
                f"Put functools.wraps({verls.__name__}.{name}) on it if it reads no others, or set "
                "padding.sharing=off.",
            )


def segments_of(micro_batch: TensorDict, trie: PrefixTrie) -> TensorDict:
    """The rows of a trie's segments, of which the fields with a value per token begin where the
    segment does."""
    segments = tu.index_select_tensor_dict(micro_batch, trie.leaf_L)
    segments.pop(TRIE)  # a micro-batch with nothing to share
    if not trie.has_branches:
        return segments
    # A row of five tokens whose segment begins at the third has the last three of each field.
    offsets = torch.tensor([0, *accumulate(trie.lengths_L)])
    for name in (INPUT_IDS, *PER_TOKEN):
        if name not in segments:
            continue
        # (tokens, ..), and position ids (.., tokens)
        dim = -1 if name == "position_ids" else 0
        rows = zip(segments[name].unbind(), trie.start_L, trie.lengths_L, strict=True)
        parts = [row.narrow(dim, start, length) for row, start, length in rows]
        segments[name] = torch.nested.nested_tensor_from_jagged(
            torch.cat(parts, dim),
            offsets.to(parts[0].device),
            jagged_dim=parts[0].ndim if dim == -1 else 1,
        )
    return segments


def expand_outputs(
    engine: Any, outputs: dict[str, Any], trie: PrefixTrie, offsets: torch.Tensor
) -> dict[str, Any]:
    """The outputs of a trie's segments as those of its rows, which begin at ``offsets``."""
    expanded = dict(outputs)
    for name, output in outputs.items():
        if output is None:
            continue
        is_nested = isinstance(output, torch.Tensor) and output.is_nested
        if not is_nested or output.offsets().diff().tolist() != trie.lengths_L:
            raise PaddingError(
                f"padding.sharing: output {name!r} of {type(engine).__name__} must be nested, "
                f"with a value per computed token ({trie.lengths_L}): rows can share nothing "
                "else. Set padding.sharing=off."
            )
        values = output.values()
        row_values = GatherTokens.apply(values, 0, trie.row_places.to(values.device))
        expanded[name] = torch.nested.nested_tensor_from_jagged(row_values, offsets)
    return expanded


class SharingEngine(VerlEngine):
    """Mixin before one of verl's engines of FSDP or VeOmni, whose two methods that make a model's
    inputs and outputs get the segments of micro-batches with a trie."""

    stock: ClassVar[type]
    """The engine that it is put before."""
    module: Any
    engine_config: Any
    branch_limit: str | None = None
    """Why rows that branch share nothing; None if attention follows them."""
    _linear_layers: Sequence[Any] = ()
    """Layers of linear attention that take packed rows one by one."""
    _followed: PrefixTrie | None = None
    """The trie that attention follows, until the backward pass has ended."""

    def keep_rows_apart(self) -> None:
        """Has the model's linear attention, if there is any, take packed rows one by one."""
        self._linear_layers = patch_linear_attention(self.module)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        # Layers that are checkpointed follow a trie again in the backward pass.
        try:
            return super().forward_backward_batch(*args, **kwargs)
        finally:
            self._follow(None)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        self._follow(micro_batch)
        if (trie := trie_of(micro_batch)) is None:
            return super().prepare_model_inputs(micro_batch)
        segments = segments_of(micro_batch, trie)
        inputs, output_args = super().prepare_model_inputs(segments)
        output_args[SEGMENTS] = segments
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        trie = trie_of(micro_batch)
        computed = micro_batch if trie is None else output_args[SEGMENTS]
        outputs: dict[str, Any]
        outputs = super().prepare_model_outputs(output, output_args, computed, *args, **kwargs)
        if trie is None:
            return outputs
        if trie.has_branches:
            _check_all_layers_attended(self.module, trie)
        return expand_outputs(self, outputs, trie, micro_batch[INPUT_IDS].offsets())

    def _follow(self, micro_batch: TensorDict | None) -> None:
        """Has the layers of the model follow the trie of a micro-batch; None for no trie.

        Attention follows one that branches, and tells other rows apart by itself; linear attention
        follows any, and that of rows that share nothing.
        """
        trie = None if micro_batch is None else trie_of(micro_batch)
        branching = trie if trie is not None and trie.has_branches else None
        if branching is not self._followed:
            self._followed = branching
            patch_attention()
            if self.engine_config.strategy == "veomni":
                patch_veomni_attention()
            for layer in attention_layers(self.module):
                setattr(layer, TRIE, branching)
        if self._linear_layers and micro_batch is not None and trie is None:
            trie = trie_of_rows(micro_batch[INPUT_IDS].offsets().diff().tolist())
        for layer in self._linear_layers:
            setattr(layer, TRIE, trie)


def _check_all_layers_attended(model: Any, trie: PrefixTrie) -> None:
    config = model.config.get_text_config()
    mixers: dict[int, set[Any]]
    mixers = {id(layer): {id(layer)} for layer in attention_layers(model)}
    for layer in linear_layers(model):
        mixers[id(layer)] = {(id(layer), CONVOLUTION), (id(layer), RULE)}
    followed = [each for each in mixers.values() if each <= trie.attended]
    if not len(followed) == len(mixers) == config.num_hidden_layers:
        raise BranchesMixedError(
            f"padding.sharing='on': {len(followed)} of {config.num_hidden_layers} "
            "layers have followed the paths of rows that diverge "
            f"(model_type={config.model_type}, "
            f"attn_implementation={config._attn_implementation}): the others mix rows. Set "
            "padding.sharing=off."
        )
