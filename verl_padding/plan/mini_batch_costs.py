"""What the optimizer steps of a layout cost: the one place where layouts of any origin are tallied
and scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.call_costs import CallCosts, one_after_the_other
from verl_padding.plan.cost import Int64s
from verl_padding.plan.layout import Layout
from verl_padding.plan.lower_bounds import equal_blocks_bound, micro_batch_bound, mini_batch_bound

RowsMDK = Sequence[Sequence[Sequence[Sequence[int]]]]
"""Row numbers of the micro-batches of each mini-batch and rank; numbers from the number of real
rows on are pads."""


@dataclass(frozen=True, kw_only=True)
class MiniBatchCost:
    """One optimizer step of a layout, with its pads unless said otherwise."""

    ranks: int
    real_rows: int
    pads: int
    tokens: int
    """Tokens of the rows and pads, as they are, not as an engine pads them."""
    real_tokens: int
    """Tokens of the real rows."""
    computed_tokens: int
    """Tokens of the real rows that are computed: those that rows of a micro-batch share, once."""
    cost: int
    """Cost of all that is computed."""
    micro_batches: int
    """Micro-batches of a rank."""
    mini_slowest: int
    """Cost of the slowest rank: the time if ranks synchronize once per step."""
    micro_slowest: int
    """Cost of the slowest rank of each micro-batch, summed: the time if ranks synchronize at each
    of them."""
    mini_bound: int
    """Least that ``mini_slowest`` can be."""
    micro_bound: int
    """Least that ``micro_slowest`` can be; 0 if micro-batches are not looked at."""


def score_layout(layout: Layout, costs: CallCosts) -> LayoutFigures:
    """The figures of a layout; lower bounds are those of its real rows, cut into its
    mini-batches."""
    is_cut = layout.micro_batch_rows is not None
    steps = mini_batch_costs(micro_batches_of(layout), costs, with_micro_bounds=is_cut)
    cost, n_ranks, budget = (
        sum(step.cost for step in steps),
        layout.dp_size,
        costs.call.token_budget,
    )
    slowest = sum(step.mini_slowest for step in steps)
    micro_slowest = sum(step.micro_slowest for step in steps)
    n_micro = layout.n_micro_batches
    computed = sum(step.computed_tokens for step in steps)
    return LayoutFigures(
        imbalance=slowest * n_ranks / cost,
        over_lower_bound=slowest / sum(step.mini_bound for step in steps),
        micro_batches=n_micro,
        packing_efficiency=computed / (n_micro * n_ranks * budget) if n_micro and budget else None,
        computed_tokens=computed,
        sharing_factor=sum(step.real_tokens for step in steps) / computed,
        micro_imbalance=micro_slowest * n_ranks / cost if is_cut else None,
        micro_over_lower_bound=micro_slowest / sum(step.micro_bound for step in steps)
        if is_cut
        else None,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
    )


def layout_time(layout: Layout, costs: CallCosts) -> int:
    """What a layout costs the slowest ranks, where they synchronize, and the handling of
    micro-batches and pads."""
    steps = mini_batch_costs(micro_batches_of(layout), costs, with_micro_bounds=False)
    by_micro = costs.call.sync_point == "micro_batch"
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    n_micro = sum(step.micro_batches for step in steps)
    return slowest + n_micro * costs.micro_batch_overhead + layout.n_pads * costs.pad_handling


def micro_batches_of(layout: Layout) -> list[list[list[list[int]]]]:
    """Row numbers of the micro-batches of each mini-batch and rank; a cell that the workers cut is
    one."""
    if layout.micro_batch_rows is None:
        return [[[list(cell)] for cell in cells_D] for cells_D in layout.cells]
    return [
        [
            [list(rows) for rows in layout.micro_batches(mini_batch, rank)]
            for rank in range(layout.dp_size)
        ]
        for mini_batch in range(layout.n_mini_batches)
    ]


def mini_batch_costs(
    rows_MDK: RowsMDK, costs: CallCosts, *, with_micro_bounds: bool = True
) -> list[MiniBatchCost]:
    """Costs of the steps of any layout, also of stock verl's.

    Example: rows of 700, 300 and 900 tokens that cost as many, a pad of 2, and micro-batches
    ``[[[2], [3]]]`` on rank 0 and ``[[[0], [1]]]`` on rank 1 cost 900 + 300 where ranks synchronize
    at each, and 1,000 where they do so once.

    Args:
        rows_MDK: all ranks of a step have equally many micro-batches. If the workers cut the cells,
            each cell is one micro-batch here.
        costs: the call's.
        with_micro_bounds: False if the workers cut the micro-batches.
    """
    return [_step_cost(rows_DK, costs, with_micro_bounds) for rows_DK in rows_MDK]


def _step_cost(
    rows_DK: Sequence[Sequence[Sequence[int]]], costs: CallCosts, with_micro_bound: bool
) -> MiniBatchCost:
    call, n_ranks = costs.call, len(rows_DK)
    numbers = np.array(
        [row for rows_K in rows_DK for rows in rows_K for row in rows], dtype=np.int64
    )
    real = numbers[numbers < costs.n_rows]
    n_pads = len(numbers) - len(real)
    computed_DK = _computed(rows_DK, costs)
    load_DK = np.array([_loads(computed_K, costs) for computed_K in computed_DK], dtype=np.int64)
    tokens_I, cost_I = costs.computed(real)
    mini_bound = mini_batch_bound(cost_I, n_ranks)
    if call.padded_to == "cell" and len(
        real
    ):  # one rank has the costliest row, and pads all others to it
        cell = max(sum(map(len, rows_K)) for rows_K in rows_DK)
        mini_bound = max(mini_bound, cell * int(cost_I.max()))
    if not with_micro_bound:
        micro_bound = 0
    elif costs.forest is not None and costs.forest.has_branches:
        micro_bound = (
            mini_bound  # a short end of a long row costs more a token than a longer one may
        )
    elif call.padded_to == "micro_batch" and call.token_budget is None:
        micro_bound = equal_blocks_bound(cost_I, n_ranks, call.micro_batch_rows)
    else:
        # Rows that are padded cost no less than packed ones, and no more of them fit into the
        # budget.
        micro_bound = micro_batch_bound(
            tokens_I, cost_I, n_ranks, call.token_budget or int(tokens_I.sum())
        )
    return MiniBatchCost(
        ranks=n_ranks,
        real_rows=len(real),
        pads=n_pads,
        tokens=int(costs.tokens_R[real].sum()) + n_pads * costs.pad_tokens,
        real_tokens=int(costs.tokens_R[real].sum()),
        computed_tokens=sum(
            int(tokens_I.sum()) for computed_K in computed_DK for tokens_I, _, _ in computed_K
        ),
        cost=int(load_DK.sum()),
        micro_batches=load_DK.shape[1],
        mini_slowest=int(load_DK.sum(axis=1).max()),
        micro_slowest=int(load_DK.max(axis=0).sum()),
        mini_bound=mini_bound,
        micro_bound=micro_bound,
    )


def micro_batch_loads(rows_K: Sequence[Sequence[int]], costs: CallCosts) -> list[int]:
    """Cost of each micro-batch of a rank, as the engine computes it."""
    return _loads(_computed([rows_K], costs)[0], costs)


def _loads(computed_K: Sequence[tuple[Int64s, Int64s, int]], costs: CallCosts) -> list[int]:
    """As ``micro_batch_loads``, of what ``_computed`` found in each micro-batch."""
    if costs.call.padded_to == "row":
        return [int(cost_I.sum()) + n_pads * costs.pad for _, cost_I, n_pads in computed_K]
    costliest_K = [
        max(int(cost_I.max(initial=0)), costs.pad if pads else 0) for _, cost_I, pads in computed_K
    ]
    if costs.call.padded_to == "cell":
        costliest_K = [max(costliest_K, default=0)] * len(costliest_K)
    return [
        costliest * (len(cost_I) + pads)
        for costliest, (_, cost_I, pads) in zip(costliest_K, computed_K, strict=True)
    ]


def _computed(
    rows_DK: Sequence[Sequence[Sequence[int]]], costs: CallCosts
) -> list[list[tuple[Int64s, Int64s, int]]]:
    """Tokens and cost of all real rows of each micro-batch that are computed, and how many pads it
    has."""
    numbers, held_I = one_after_the_other(rows_DK)
    is_real_I, n_micro = numbers < costs.n_rows, sum(map(len, rows_DK))
    pads_B = np.bincount(held_I[~is_real_I], minlength=n_micro).tolist()
    batch_I, tokens_I, cost_I = costs.computed_in(numbers[is_real_I], held_I[is_real_I])
    ends = np.searchsorted(batch_I, np.arange(1, n_micro))
    computed_B = zip(
        np.split(tokens_I, ends), np.split(cost_I, ends), pads_B, strict=False
    )  # none of no micro-batch
    return [list(islice(computed_B, len(rows_K))) for rows_K in rows_DK]
