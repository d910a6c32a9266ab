"""Local mini-batches of a call: how many rows they hold, which rows each rank gets, and the cutters
that then cut each local mini-batch by itself.

Local mini-batches need equal row counts, not equal real-row counts: a rank with one long row and
eleven pads is as good as one with twelve short rows. Where micro-batches are cut by tokens, pads
are nearly free, so the ranks are balanced by cost and pads level the counts. Where micro-batches
are cut by rows, each takes a pass of its own even if it holds pads alone, so local mini-batches are
as small as they can be and the ranks are balanced under that cap.
"""

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.layout import RowsDK
from verl_padding.plan.packing.bins import balance, spread
from verl_padding.plan.packing.pad_places import fill_places, fit


def balanced(costs: CallCosts, rows: Sequence[int], n_bins: int, max_rows: int) -> list[list[int]]:
    """The rows in bins of about the same cost, the costliest bin first."""
    # Each place takes a pad at least, the same in all bins: what a row costs beyond it is balanced.
    cost_I = costs.cost_R[np.asarray(rows, dtype=np.int64)]
    extra_I = cost_I - np.minimum(costs.pad, cost_I.min(initial=costs.pad))
    bins = balance(extra_I, n_bins, max_rows)
    costliest_first = np.argsort([-extra_I[items].sum() for items in bins], kind="stable")
    return [[rows[item] for item in bins[number]] for number in costliest_first]


def fixed_row_count(costs: CallCosts, rows: Sequence[int], size: int | None) -> RowsDK:
    """Micro-batches of a fixed number of rows, and of about the same cost: they need the least
    memory.

    If they are in the same order on all ranks, the costliest first, ranks that synchronize at each
    wait least.
    """
    # Costs 6 5 2 1 on one rank, two rows a micro-batch: 6 1 and 5 2, the costlier one first.
    call = costs.call
    size = size or call.min_local_batch_rows(len(rows))
    places_K = [call.micro_batch_rows] * (size // call.micro_batch_rows)
    rows_D = balanced(costs, rows, call.dp_size, size)
    rows_DK = [balanced(costs, held, len(places_K), call.micro_batch_rows) for held in rows_D]
    return fill_places(costs, rows_DK, places_K)


def whole_local_batches(costs: CallCosts, rows: Sequence[int], size: int | None) -> RowsDK:
    """Each local mini-batch is one micro-batch, which verl's packer cuts in the workers."""
    # Rows of 900, 300, 300 and 300 tokens on two ranks: local mini-batches of two rows take 1,200 |
    # 600; of three, 900 and two pads | 300 300 300.
    call, tried = costs.call, []
    # A rank with one long row leaves the rest to the others, and pads level the counts, if that
    # pays for the pads.
    for max_rows in (call.min_local_batch_rows(len(rows)), size or len(rows)):
        rows_D = balanced(costs, rows, call.dp_size, max_rows)
        places = size or up_to_multiple(max(map(len, rows_D)), call.local_batch_multiple)
        tried.append(fill_places(costs, [[held] for held in rows_D], [places]))
    return min(tried, key=costs.step_time)


def sync_per_step(costs: CallCosts, rows: Sequence[int], size: int | None) -> RowsDK:
    """As few micro-batches as hold all local mini-batches of a mini-batch, for ranks that
    synchronize once in it. Those of a rank cost about the same."""
    local_batches = whole_local_batches(costs, rows, size)
    multiple = costs.call.micro_batch_multiple
    rows_D = [[row for row in local_batch if row < costs.n_rows] for [local_batch] in local_batches]
    max_tokens = max(int(costs.tokens_R[rows].sum()) for rows in rows_D)
    n_bins = up_to_multiple(-(-max_tokens // costs.token_budget), multiple)
    # With a micro-batch for each row, all have room.
    while (rows_DK := _local_batches_in_bins(costs, rows_D, n_bins)) is None:
        n_bins += multiple
    return fit(costs, rows_DK, len(local_batches[0][0]))


def _local_batches_in_bins(
    costs: CallCosts, rows_D: Sequence[Sequence[int]], n_bins: int
) -> RowsDK | None:
    """The rows of each local mini-batch in micro-batches of about the same cost, the costliest
    first; None if they have no room."""
    rows_DK = []
    for rows in rows_D:
        by_length = costs.longest_first(rows)
        tokens, cost = costs.tokens_R[by_length].tolist(), costs.cost_R[by_length].tolist()
        bins = spread(range(len(rows)), tokens, cost, [0] * n_bins, costs.token_budget)
        if bins is None:
            return None
        bins.sort(key=lambda items: -sum(cost[item] for item in items))
        rows_DK.append([by_length[items].tolist() for items in bins])
    return rows_DK
