"""The plan's micro-batches in verl's workers, instead of those of verl's packer.

verl 0.9's engines cut each call's rows with ``prepare_micro_batches``, a function that their
modules import by name; no setting or registry avoids it. While a padded engine runs a call, that
name is replaced in the module of its engine. It can go when verl takes micro-batches that are
already cut (tests/worker/test_plan_packer.py).
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.planned_call import BATCH_ROW, planned_call, read_column
from verl_padding.prefix_sharing.engine import find_trie
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.prefix_sharing.row_inputs import INPUT_IDS

logger = logging.getLogger(__name__)

PATCHED = "prepare_micro_batches"
PrepareMicroBatches = Callable[..., tuple[list[TensorDict], list[list[int]] | None]]


def module_of(engine: Any) -> dict[str, Any]:
    """The names of the module that cuts an engine's micro-batches."""
    names: dict[str, Any] = inspect.unwrap(engine.forward_backward_batch).__globals__
    return names


@contextmanager
def micro_batches_of_plan(engine: Any) -> Iterator[None]:
    """A with-block in which one of verl's engines follows the plan."""
    module = module_of(engine)
    verls = module.get(PATCHED)
    if verls is None:  # a cut of its own, so that the plan's packer is off
        yield
        return
    module[PATCHED] = follow_plan(verls)
    try:
        yield
    finally:
        module[PATCHED] = verls


def follow_plan(prepare: PrepareMicroBatches) -> PrepareMicroBatches:
    """verl's ``prepare_micro_batches``, except for calls whose micro-batches the plan has cut by
    tokens.

    Those need no packing, retries or collective: the plan has given every rank the same number of
    them. Where rows share, each also gets the trie of what is computed
    (:mod:`~verl_padding.prefix_sharing.engine`).
    """

    @functools.wraps(prepare)
    def prepare_micro_batches(
        data: TensorDict, **kwargs: Any
    ) -> tuple[list[TensorDict], list[list[int]] | None]:
        call = planned_call(data)
        if call is None or call.layout.cut_by != "tokens":
            return prepare(data, **kwargs)
        layout, numbers = call.layout, tuple(read_column(data, BATCH_ROW).tolist())
        local_batches = zip(chain(*layout.local_batches), chain(*layout.rows_MDK), strict=True)
        if (rows_K := dict(local_batches).get(numbers)) is None:
            raise PaddingDataError(
                f"rows {numbers[:8]}.. on one rank: not those of the plan. Set padding.packer=verl."
            )
        # Micro-batches (3, 5) and (8,) of a rank are at the places 0 1 and 2.
        ends = accumulate(map(len, rows_K), initial=0)
        indices = [list(range(begin, end)) for begin, end in pairwise(ends)]
        micro_batches = [tu.index_select_tensor_dict(data, places) for places in indices]
        # Ulysses ranks, which share rows, have a part of the budget each.
        ranks = tu.get_non_tensor_data(data=data, key="sp_size", default=1)
        budget = int(data["max_token_len_per_gpu"]) * int(ranks)
        packs_rows = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        for micro_batch, rows in zip(micro_batches, rows_K, strict=True):
            tokens = computed = len(micro_batch[INPUT_IDS].values())
            if call.may_branch is not None and packs_rows:
                position_R = [
                    call.position_R[row] if row < layout.n_rows else -1
                    for row in rows
                    if call.position_R
                ]
                trie = find_trie(micro_batch, may_branch=call.may_branch, position_R=position_R)
                computed = trie.tokens
                if computed < tokens:
                    tu.assign_non_tensor_data(micro_batch, TRIE, trie)
            if computed > budget:
                if call.may_branch is None:
                    raise PaddingDataError(
                        f"a micro-batch of {tokens} tokens, more than its budget of {budget}: rows "
                        "have changed since the plan. Set padding.packer=verl."
                    )
                logger.warning(
                    f"verl_padding: a micro-batch computes {computed} tokens, more than its budget "
                    f"of {budget}: its rows have changed, or share less than planned. If memory "
                    "does not suffice, set padding.sharing=off."
                )
        return micro_batches, indices

    return prepare_micro_batches
