"""Cuts mini-batches for engines that pad rows, where each row costs as much as the longest beside
it.

Call the rows of a micro-batch a *block*: with s rows of which the longest costs C it costs s C, and
pads cost C like any other row. Rows are sorted, longest first, pads behind them; blocks of
neighbours are then all that is needed. Say that some layout has blocks of s_1, s_2, .. rows, in the
order of their longest rows. The first k - 1 of them hold at most s_1 + .. + s_(k-1) rows, so the
longest row of block k is no shorter than the one at that place of the sorted rows, which is where
block k of the same sizes begins if neighbours are put together. So no block becomes costlier,
larger or higher than its micro-step by sorting, whatever the sizes are; what is left to choose is
the sizes.
"""

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.layout import RowsDK
from verl_padding.plan.packing.pad_places import fill_places


def cut_rectangles(costs: CallCosts, rows: Sequence[int], size: int | None) -> RowsDK:
    """Micro-batch k of all ranks has the same number of rows, neighbours in the order of
    lengths."""
    # Rows of 9 8 7 6 5 tokens on two ranks, micro-batches of two and of one row: 9 8 | 7 6 is the
    # first micro-step, 5 | pad the second.
    n_ranks, by_length = costs.call.dp_size, costs.longest_first(rows)
    size = size or costs.call.min_local_batch_rows(len(rows))
    # A row shorter than a pad counts as a pad, as it may stand beside one.
    places = np.full(n_ranks * size, costs.pad_tokens, dtype=np.int64)
    places[: len(by_length)] = np.maximum(costs.tokens_R[by_length], costs.pad_tokens)
    if costs.call.padded_to == "local_batch":
        # The local mini-batch of the longest row takes longest, whatever the others hold.
        places[:] = places[0]
    n_rows_K = _micro_step_rows(costs, places[::n_ranks], size)
    rows_DK: list[list[list[int]]] = [[] for _ in range(n_ranks)]
    load_D = [0] * n_ranks
    begin = 0
    for n_rows in n_rows_K:
        end = begin + n_ranks * n_rows
        blocks_D = _blocks(by_length[begin:end].tolist(), n_ranks, n_rows)
        for rank, block in zip(np.argsort(load_D, kind="stable").tolist(), blocks_D, strict=True):
            rows_DK[rank].append(block)
            load_D[rank] += n_rows * (int(costs.cost_R[block[0]]) if block else costs.pad)
        begin = end
    return fill_places(costs, rows_DK, n_rows_K)


def _blocks(rows: Sequence[int], n_blocks: int, size: int) -> list[list[int]]:
    """Cuts rows, longest first, into blocks of ``size`` places; the last places of the last blocks
    are for pads, and none holds only pads while there are rows for all."""
    # Rows 7 6 5 4, three blocks of three places: 7 6, 5 and 4.
    found, begin = [], 0
    for later_blocks in reversed(range(n_blocks)):
        left = len(rows) - begin
        end = begin + min(size, max(left - later_blocks, min(left, 1)))
        found.append(list(rows[begin:end]))
        begin = end
    return found


def _micro_step_rows(costs: CallCosts, longest_I: Int64s, size: int) -> list[int]:
    """Rows of a rank's micro-batch in each micro-step.

    A block ends where padding its rows to the longest one costs more than the handling of a
    micro-batch: where lengths fall evenly, that is the best size. With lengths 900 800 300 200, 256
    tokens of handling and a cost of one a token, 300 would add 600 to the 100 that 800 wastes: the
    blocks are 900 800 and 300 200.

    Args:
        longest_I: tokens of the longest row left when i rows of each rank are placed, for i = 0 ..
            size - 1.
    """
    call, cost_I = costs.call, costs.cost_model(longest_I)
    if call.token_budget is None:
        return [call.micro_batch_rows] * (size // call.micro_batch_rows)
    # Limits of the budget: with 2,000 tokens, a longest row of 900 takes one row beside it.
    starts = [0]
    while starts[-1] < size:
        i = starts[-1]
        # At least one: no row is longer than the budget.
        most = min(size - i, call.token_budget // int(longest_I[i]))
        wasted_I = np.cumsum(cost_I[i] - cost_I[i : i + most])
        starts.append(i + int(np.searchsorted(wasted_I, costs.micro_batch_overhead, side="right")))
    n_rows_K: list[int] = np.diff(starts).tolist()
    while len(n_rows_K) % call.micro_batch_multiple:
        largest = n_rows_K.index(max(n_rows_K))
        half = n_rows_K[largest] // 2
        n_rows_K[largest : largest + 1] = [n_rows_K[largest] - half, half]
    return n_rows_K
