"""The plan's micro-batches in verl's workers, and rows that extend each other computed once in them.

verl 0.9's engines cut each call's rows with ``prepare_micro_batches``, a function that their modules import by name;
no setting or registry avoids it. With ``padding.packer=plan`` that name is replaced in the module of a worker's engine.
It can go when verl takes micro-batches that are already cut (tests/worker/test_plan_packer.py).

A causal model's output at a position depends on the tokens up to it. So if row b extends row a, the log-probs, entropy
and values of a are those of b's first positions. With ``padding.sharing=chains`` an FSDP engine's inputs are made from
the tips of a micro-batch alone, and every output is expanded to all of its rows before loss, metrics or driver see it;
backward adds up the gradients of all slices. verl 0.9 makes inputs and outputs in two methods, which are wrapped in the
class of a worker's engine until verl shares prefixes by itself (tests/worker/test_shared_prefixes.py). The last output
of a row belongs to whatever token comes next: shared, it is another one than alone, and nothing reads it.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError, PaddingError
from verl_padding.job.known_verl import KNOWN_VERL
from verl_padding.pads.columns import CHAIN, MICRO_BATCH, TIPS, read_column
from verl_padding.pads.lineage import EXTENDS, TOKENS, Inputs
from verl_padding.plan import Sharing
from verl_padding.worker.training_workers import for_training_workers

logger = logging.getLogger(__name__)

PATCHED = "prepare_micro_batches"
PrepareMicroBatches = Callable[..., tuple[list[TensorDict], list[list[int]] | None]]
SHARES = "_verl_padding_shares"
"""Attribute of an engine's method that is wrapped already."""
COMPUTED = "computed_rows"
"""Key of what an engine keeps of a micro-batch's inputs for its outputs: the rows that are computed, selected once."""


def install(sharing: Sharing = "off") -> Callable[[Any], Any]:
    """For verl's ``execute_with_func_generator``: has the engines of a worker follow the plan, or refuses them."""

    @for_training_workers
    def patch(role: str, trainee: Any) -> None:
        engine = trainee.engine
        module = inspect.unwrap(type(engine).forward_backward_batch).__globals__
        if PATCHED not in module:
            raise PaddingError(
                f"padding.packer='plan': {type(engine).__name__} does not cut micro-batches as the engines of "
                f"verl {KNOWN_VERL} do. Set padding.packer=verl."
            )
        module[PATCHED] = follow_plan(inspect.unwrap(module[PATCHED]), sharing=sharing)
        if sharing == "chains":
            share_in(engine)

    return patch


def follow_plan(prepare: PrepareMicroBatches, *, sharing: Sharing = "off") -> PrepareMicroBatches:
    """verl's ``prepare_micro_batches``, except for calls whose rows say which micro-batch they are in.

    Those need no packing, retries or collective: the plan has given every rank the same number of micro-batches. With
    ``chains`` each of them also says which rows are computed.
    """

    @functools.wraps(prepare)
    def prepare_micro_batches(data: TensorDict, **kwargs: Any) -> tuple[list[TensorDict], list[list[int]] | None]:
        by_rows = not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
        if by_rows or MICRO_BATCH not in data:
            return prepare(data, **kwargs)
        number_R = read_column(data, MICRO_BATCH).tolist()
        indices = [list(rows) for _, rows in groupby(range(len(number_R)), key=number_R.__getitem__)]
        if [number_R[rows[0]] for rows in indices] != list(range(len(indices))):
            raise PaddingDataError(
                f"rows of micro-batches {number_R} on one rank: not in the plan's order, so rows were lost or moved. "
                "Set padding.packer=verl to train without that order."
            )
        budget = data["max_token_len_per_gpu"] * tu.get_non_tensor_data(data=data, key="sp_size", default=1)
        micro_batches = [tu.index_select_tensor_dict(data, rows) for rows in indices]
        shares = sharing == "chains" and tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        for micro_batch in micro_batches:
            tip_R = tips_of(micro_batch) if shares else range(len(micro_batch))
            _check_tokens(micro_batch, tip_R, budget)
            if len(set(tip_R)) < len(tip_R):
                tu.assign_non_tensor_data(micro_batch, TIPS, tip_R)
        return micro_batches, indices

    return prepare_micro_batches


def _check_tokens(micro_batch: TensorDict, tip_R: Sequence[int], budget: int) -> None:
    """Refuses a micro-batch that was not planned like this; a wrongly named chain only costs time and memory."""
    tokens_R = micro_batch[TOKENS].offsets().diff().tolist()
    planned = sum(max(tokens_R[row] for row in rows) for rows in _chains_of(micro_batch))
    computed = sum(tokens_R[tip] for tip in set(tip_R))
    if planned > budget:
        raise PaddingDataError(
            f"a micro-batch of {planned} tokens, more than the {budget} of this call: rows have changed since the plan."
            " Set padding.packer=verl to have the workers cut them anew."
        )
    if computed > planned:
        logger.warning(
            f"verl_padding: a micro-batch computes {computed} tokens, where {planned} were planned and the budget is "
            f"{budget}: its rows do not extend each other as planned. Correct extra_fields[{EXTENDS!r}] of the agent "
            "loop, or set padding.sharing=off."
        )


def _chains_of(data: TensorDict) -> list[list[int]]:
    """The rows of each chain of a micro-batch, as planned; a pad, or a row of no chain, is one by itself."""
    chain_R = read_column(data, CHAIN).tolist() if CHAIN in data else [-1] * len(data)
    rows_of: dict[int, list[int]] = {}
    for row, chain in enumerate(chain_R):
        rows_of.setdefault(chain if chain >= 0 else ~row, []).append(row)
    return list(rows_of.values())


def tips_of(data: TensorDict) -> tuple[int, ...]:
    """The number of each row's tip: the longest row of its chain that extends it, or itself.

    The plan says which rows are a chain; here they are compared once more: a wrong one costs time and changes nothing.
    """
    tip_R = list(range(len(data)))
    if chains := [rows for rows in _chains_of(data) if len(rows) > 1]:
        lengths, inputs = [len(row) for row in data[TOKENS].unbind()], Inputs(data)
        for rows in chains:
            ordered = sorted(rows, key=lambda row: (lengths[row], row))
            for shorter, longer in reversed(list(pairwise(ordered))):
                if inputs.extends(longer, shorter):
                    tip_R[shorter] = tip_R[longer]
    return tuple(tip_R)


def computed_rows(data: TensorDict) -> list[int]:
    """The numbers of those rows of a micro-batch that its engine computes, in order."""
    return sorted(set(tu.get_non_tensor_data(data=data, key=TIPS, default=range(len(data)))))


def share_in(engine: Any) -> None:
    """Makes the class of an engine compute tips alone; one that is not made as verl 0.9's FSDP engines is refused."""
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
        offsets = micro_batch[TOKENS].offsets()
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
