"""What rows, pads and micro-batches cost in one worker call, and the figures of its layout."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from verl_padding.plan.calls import Call
from verl_padding.plan.cost import CostModel, Int64s, up_to_multiple
from verl_padding.plan.layout import Layout, RowsDK, RowsMDK
from verl_padding.plan.prefix_tries import PrefixTries

MICRO_BATCH_OVERHEAD_TOKENS = 256
"""Handling a micro-batch (parameters are gathered, kernels started, mostly beside other work)
delays a step as much as this many tokens more on every rank: a hundredth of a full micro-batch of
16k to 32k."""
PAD_HANDLING_TOKENS = 8
"""Handling a pad (it is written to the queue, fetched, its outputs are written back, mostly one row
after the other) takes a tenth of a millisecond, in which a rank trains this many tokens of a model
of a billion parameters."""


def flatten_micro_batches(rows_DK: RowsDK) -> tuple[Int64s, Int64s]:
    """The rows of all micro-batches behind each other, rank by rank, and for each row the number of
    its micro-batch."""
    # [[0, 1], [2]] on rank 0 and [[3], [4]] on rank 1: rows 0 1 2 3 4 of micro-batches 0 0 1 2 3.
    rows_B = [rows for rows_K in rows_DK for rows in rows_K]
    numbers = np.fromiter(chain.from_iterable(rows_B), dtype=np.int64)
    return numbers, np.repeat(np.arange(len(rows_B)), list(map(len, rows_B)))


@dataclass(frozen=True, kw_only=True)
class CallCosts:
    """Costs of a worker call, made once for all that plans it."""

    call: Call
    tokens_R: Int64s
    """Tokens of each real row of the batch."""
    cost_model: CostModel
    """Cost of a row by its tokens."""
    pad_tokens: int
    """Tokens of a pad."""
    tries: PrefixTries | None = None
    """What rows share, if it is computed once where they are in one micro-batch; else None."""

    @property
    def n_rows(self) -> int:
        """Real rows of the batch."""
        return len(self.tokens_R)

    @property
    def token_budget(self) -> int:
        """Of a call whose micro-batches are cut by tokens."""
        assert self.call.token_budget is not None
        return self.call.token_budget

    @cached_property
    def cost_R(self) -> Int64s:
        """Cost of each real row."""
        return self.cost_model(self._rounded_up(self.tokens_R))

    @cached_property
    def pad(self) -> int:
        """Cost of a pad."""
        return self.row_cost(self.pad_tokens)

    @cached_property
    def micro_batch_overhead(self) -> int:
        """Cost of handling a micro-batch, and of rounding it up to a bucket: half a bucket on
        average."""
        return self.row_cost(MICRO_BATCH_OVERHEAD_TOKENS + self.call.bucket_tokens // 2)

    @cached_property
    def pad_handling(self) -> int:
        """Cost of handling a pad, which all ranks wait for."""
        return self.row_cost(PAD_HANDLING_TOKENS)

    def row_cost(self, tokens: int) -> int:
        """Cost of this many tokens in one row."""
        return int(self.cost_model(np.array([tokens], dtype=np.int64))[0])

    def suffix_cost(self, rows: Int64s, start_I: Int64s) -> Int64s:
        """Cost of what rows have from token ``start_I`` on: attention looks back at what is before
        it."""
        # Tokens 3 to 5 of a row see all five: the pairs of five tokens less those of the first two.
        # In multiples of 4, one token more is computed: the pairs of six.
        end_I = start_I + self._rounded_up(self.tokens_R[rows] - start_I)
        return self.cost_model(end_I) - self.cost_model(start_I)

    def micro_batch_loads(self, rows_DK: RowsDK) -> tuple[Int64s, Int64s, Int64s]:
        """Of each rank's micro-batches (D, K): the tokens that the engine computes, what they take
        of the token budget, and their cost. Numbers from ``n_rows`` on are pads.

        A row that branches off another one takes a multiple of ``token_multiple`` of the budget,
        and ``min_branch_tokens`` at least.
        """
        # Rows of 5 and 3 tokens beside a pad of 2: 10 tokens where rows are packed, and 15 where
        # each is padded to the longest.
        shape = len(rows_DK), len(rows_DK[0])
        numbers, batch_I = flatten_micro_batches(rows_DK)
        is_real_I, n_rows_B = numbers < self.n_rows, np.bincount(batch_I, minlength=np.prod(shape))
        pads_B = n_rows_B - np.bincount(batch_I[is_real_I], minlength=len(n_rows_B))
        rows, batch_I = numbers[is_real_I], batch_I[is_real_I]
        start_I = np.zeros_like(rows)
        if self.tries is not None:
            at, start_I = self.tries.segments(rows, batch_I)
            rows, batch_I = rows[at], batch_I[at]
        tokens_I = self.tokens_R[rows] - start_I
        loads = []
        for computed_I, pad in (
            (tokens_I, self.pad_tokens),
            (self.used_by_rows(tokens_I, start_I > 0), self.pad_tokens),
            (self.suffix_cost(rows, start_I), self.pad),
        ):
            if self.call.padded_to == "row":
                load_B = pads_B * pad
                np.add.at(load_B, batch_I, computed_I)
            else:
                largest_B = np.where(pads_B > 0, pad, 0)
                np.maximum.at(largest_B, batch_I, computed_I)
                if self.call.padded_to == "local_batch":
                    largest_D = largest_B.reshape(shape).max(axis=1, initial=0)
                    largest_B = largest_D.repeat(shape[1])
                load_B = n_rows_B * largest_B
            loads.append(load_B.reshape(shape))
        return loads[0], loads[1], loads[2]

    def used_by_rows(self, tokens_I: Int64s, branches_I: NDArray[np.bool_]) -> Int64s:
        """What rows take of the token budget, by how many of their tokens are computed and by
        whether each branches off another one."""
        used_I = np.maximum(self._rounded_up(tokens_I), self.call.min_branch_tokens)
        return np.where(branches_I, used_I, tokens_I)

    def _rounded_up(self, tokens_I: Int64s) -> Int64s:
        """What the engine computes for rows, or segments, of so many tokens."""
        return up_to_multiple(tokens_I, self.call.token_multiple)

    def step_time(self, rows_DK: RowsDK) -> int:
        """Cost of the slowest ranks of a mini-batch, where they synchronize, and the handling of
        micro-batches and pads."""
        # Ranks that cost 900 + 100 and 300 + 600 in two micro-batches: 900 + 600 where they
        # synchronize at each, and 1,000 where they do so once.
        _, _, load_DK = self.micro_batch_loads(rows_DK)
        by_micro = self.call.sync_point == "micro_batch"
        slowest = load_DK.max(axis=0).sum() if by_micro else load_DK.sum(axis=1).max()
        n_pads = int((flatten_micro_batches(rows_DK)[0] >= self.n_rows).sum())
        handling = load_DK.shape[1] * self.micro_batch_overhead + n_pads * self.pad_handling
        return int(slowest) + handling

    def longest_first(self, rows: Sequence[int]) -> Int64s:
        """The numbers of rows, the longest row first."""
        numbers = np.array(rows, dtype=np.int64)
        return numbers[np.argsort(-self.tokens_R[numbers], kind="stable")]


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
    """What a layout costs, by the job's cost model; pads cost too."""

    imbalance: float
    """Cost of the slowest rank / cost of the mean rank, each summed over the mini-batches; 1 is
    perfect."""
    micro_batches: int | None
    """Micro-batches of a rank, over all mini-batches; None if verl's packer cuts them."""
    packing_efficiency: float | None
    """Computed tokens of real rows / tokens that all ranks' micro-batches could hold; None if
    verl's packer cuts them, or without a token budget."""
    computed_tokens: int
    """Tokens of the real rows that are computed: all of them, or with shared prefixes those of
    their segments."""
    sharing_factor: float
    """Tokens of the real rows / computed tokens; 1 if nothing is shared."""
    micro_imbalance: float | None
    """As ``imbalance``, but with the slowest rank of each micro-batch, for ranks that wait for each
    other at every one; None if verl's packer cuts them."""


def score_layout(layout: Layout, costs: CallCosts) -> LayoutFigures:
    """The figures of a layout."""
    total: Counter[str] = Counter()
    for step in mini_batch_costs(layout.rows_MDK, costs):
        total.update(step)
    n_micro = None if layout.cut_by == "verl" else total["micro_batches"]
    n_ranks, computed = layout.dp_size, total["computed_tokens"]
    room = (n_micro or 0) * n_ranks * (costs.call.token_budget or 0)
    return LayoutFigures(
        imbalance=total["mini_slowest"] * n_ranks / total["cost"],
        micro_batches=n_micro,
        packing_efficiency=computed / room if room else None,
        computed_tokens=computed,
        sharing_factor=total["real_tokens"] / computed,
        micro_imbalance=total["micro_slowest"] * n_ranks / total["cost"] if n_micro else None,
    )


def mini_batch_costs(rows_MDK: RowsMDK, costs: CallCosts) -> list[dict[str, int]]:
    """Of each optimizer step of a layout: numbers of ``real_rows``,
    ``pads`` and a rank's ``micro_batches``; ``real_tokens``, of the real rows, and of these
    ``computed_tokens``, which rows of a micro-batch share, once; with its pads, the ``cost`` of all
    that is computed, that of the slowest rank (``mini_slowest``: the time if ranks synchronize once
    per step), and that of the slowest rank of each micro-batch, summed (``micro_slowest``: the time
    if they synchronize at each).

    Example: rows of 700, 300 and 900 tokens that cost as many, a pad of 2, and micro-batches
    ``[[[2], [3]]]`` on rank 0 and ``[[[0], [1]]]`` on rank 1 cost 900 + 300 where ranks synchronize
    at each, and 1,000 where they do so once.

    Args:
        rows_MDK: all ranks of a step have equally many micro-batches. If the workers cut the local
            mini-batches, each is one micro-batch here.
        costs: the call's.
    """
    steps = []
    for rows_DK in rows_MDK:
        numbers, _ = flatten_micro_batches(rows_DK)
        real = numbers[numbers < costs.n_rows]
        n_pads, real_tokens = len(numbers) - len(real), int(costs.tokens_R[real].sum())
        tokens_DK, _, load_DK = costs.micro_batch_loads(rows_DK)
        shared_computed = int(tokens_DK.sum()) - n_pads * costs.pad_tokens
        steps.append(
            {
                "real_rows": len(real),
                "pads": n_pads,
                "real_tokens": real_tokens,
                "computed_tokens": real_tokens if costs.tries is None else shared_computed,
                "cost": int(load_DK.sum()),
                "micro_batches": load_DK.shape[1],
                "mini_slowest": int(load_DK.sum(axis=1).max()),
                "micro_slowest": int(load_DK.max(axis=0).sum()),
            }
        )
    return steps
