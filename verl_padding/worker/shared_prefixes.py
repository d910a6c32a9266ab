"""Rows that extend each other are computed once in verl's FSDP engines, which get the tips of a micro-batch alone.

A causal model's output at a position depends on the tokens up to it. So if row b extends row a, the log-probs, entropy
and values of a are those of b's first positions. The engine's inputs are made from the tips, and every output is
expanded to all rows of the micro-batch before loss, metrics or driver see it; backward adds up the gradients of all
slices. verl 0.9 has no place for this: its engines make inputs and outputs in two methods, which this module wraps in
the class of a worker's engine, until verl shares prefixes by itself (tests/worker/test_shared_prefixes.py).

The last output of a row belongs to whatever token comes next. Shared, it is another one than alone, and nothing reads
it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingError
from verl_padding.pads.columns import CHAIN, TIPS, read_column
from verl_padding.pads.lineage import TOKENS, Inputs

SHARES = "_verl_padding_shares"
"""Attribute of an engine's method that is wrapped already."""
COMPUTED = "computed_rows"
"""Key of what an engine keeps of a micro-batch's inputs for its outputs: the rows that are computed, selected once."""


def tips_of(data: TensorDict) -> tuple[int, ...]:
    """The number of each row's tip: the longest row of its chain that extends it, or itself.

    The plan says which rows are a chain; here they are compared once more, so that a wrong chain costs time and changes
    nothing. Pads, and rows of no chain, are computed as they are.

    Args:
        data: a micro-batch, on the CPU.
    """
    tip_R = list(range(len(data)))
    if CHAIN not in data.keys():  # noqa: SIM118  (a TensorDict)
        return tuple(tip_R)
    lengths = [len(row) for row in data[TOKENS].unbind()]
    members: dict[int, list[int]] = {}
    for row, chain in enumerate(read_column(data, CHAIN).tolist()):
        if chain >= 0:
            members.setdefault(chain, []).append(row)
    inputs = Inputs(data)
    for rows in members.values():
        rows.sort(key=lambda row: (lengths[row], row))
        for shorter, longer in reversed(list(pairwise(rows))):
            if inputs.extends(longer, shorter):
                tip_R[shorter] = tip_R[longer]
    return tuple(tip_R)


def computed_rows(data: TensorDict) -> list[int]:
    """The numbers of those rows of a micro-batch that its engine computes, in order."""
    return sorted(set(tu.get_non_tensor_data(data=data, key=TIPS, default=range(len(data)))))


def share_in(engine: Any) -> None:
    """Makes the class of an engine compute the tips of its micro-batches alone.

    Raises:
        PaddingError: the engine does not make its inputs and outputs as verl 0.9's FSDP engines do.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    cls = type(engine)
    # Rows are compared by what verl's own methods read of them: those of another engine may read more.
    for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step"):
        # The module that Python, or functools.wraps, has written on it.
        own: Any = getattr(cls, name, None)
        if getattr(inspect.unwrap(own), "__module__", None) != FSDPEngineWithLMHead.__module__:
            raise PaddingError(
                f"padding.sharing='chains': {cls.__name__} has a {name} of its own, not that of verl's FSDP engines: "
                "it may read fields of rows that are not compared before rows share. Put functools.wraps("
                f"FSDPEngineWithLMHead.{name}) on it if it reads no others, or set padding.sharing=off."
            )
    # Each by itself: the engine of a critic inherits one of them from that of an actor, which may be wrapped already.
    for name, wrap in (("prepare_model_inputs", _of_tips), ("prepare_model_outputs", _of_all_rows)):
        method = getattr(cls, name)
        if not hasattr(method, SHARES):
            wrapped = wrap(method)
            setattr(wrapped, SHARES, True)
            setattr(cls, name, wrapped)


def _of_tips(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: TensorDict) -> Any:
        tip_R = tu.get_non_tensor_data(data=micro_batch, key=TIPS, default=None)
        if tip_R is None:
            return prepare(self, micro_batch=micro_batch)
        tips = tu.index_select_tensor_dict(micro_batch, computed_rows(micro_batch))
        tips.pop(TIPS)  # a micro-batch with nothing to share
        inputs, output_args = prepare(self, micro_batch=tips)
        output_args[COMPUTED] = tips
        return inputs, output_args

    return prepare_model_inputs


def _of_all_rows(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        tip_R = tu.get_non_tensor_data(data=micro_batch, key=TIPS, default=None)
        computed = micro_batch if tip_R is None else output_args[COMPUTED]
        outputs: dict[str, Any] = prepare(self, output, output_args, computed, logits_processor_func)
        if tip_R is None:
            return outputs
        offsets = micro_batch["input_ids"].offsets()
        lengths = offsets.diff().tolist()
        place = {tip: number for number, tip in enumerate(computed_rows(micro_batch))}
        tokens = [lengths[tip] for tip in place]

        def expand(name: str, of_tips: Any) -> torch.Tensor:
            rows = of_tips.unbind() if isinstance(of_tips, torch.Tensor) and of_tips.is_nested else ()
            if [len(row) for row in rows] != tokens:
                raise PaddingError(
                    f"padding.sharing='chains': {type(self).__name__}'s {name!r} must be nested, with a value for each "
                    f"token of the rows that are computed ({tokens}): anything else of a row is not that of a shorter "
                    "one. Set padding.sharing=off."
                )
            slices = [rows[place[tip]][:length] for tip, length in zip(tip_R, lengths, strict=True)]
            return torch.nested.nested_tensor_from_jagged(torch.cat(slices), offsets)

        return {name: None if value is None else expand(name, value) for name, value in outputs.items()}

    return prepare_model_outputs
