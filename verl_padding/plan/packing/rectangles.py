"""Deals and cuts mini-batches for engines that pad rows, where each row costs as much as the longest beside it.

Call the rows of a micro-batch a *block*: with s rows of which the longest costs C it costs s C, and pads cost C like
any other row. Rows are sorted, longest first, pads behind them; blocks of neighbours are then all that is needed. Say
that some layout has blocks of s_1, s_2, .. rows, in the order of their longest rows. The first k - 1 of them hold at
most s_1 + .. + s_(k-1) rows, so the longest row of block k is no shorter than the one at that place of the sorted rows,
which is where block k of the same sizes begins if neighbours are put together. So no block becomes costlier, larger or
higher than its level by sorting, whatever the sizes are; what is left to choose is the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.packing.pads import FilledCells

LESS_MEMORY = 128
"""A mini-batch may take longer by its time over this if that makes its largest block smaller."""


def cut_rectangles(costs: CallCosts, rows: Sequence[int], size: int) -> FilledCells:
    """Deals a mini-batch out and cuts it.

    Args:
        rows: real rows of the mini-batch, no more than the ranks have places for.
        size: rows of a cell, pads among them.
    """
    by_length = costs.longest_first(rows)
    cut = _cut_cells if costs.call.padded_to == "cell" else _cut_levels
    rows_DK, pads_DK = cut(costs, by_length, size)
    return FilledCells(rows_DK=rows_DK, pads_DK=pads_DK)


def _cut_levels(costs: CallCosts, by_length: Int64s, size: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Micro-batch k of all ranks has the same number of rows, neighbours in the order of lengths."""
    n_ranks = costs.call.dp_size
    tokens = _with_pads(costs, by_length, n_ranks * size)
    n_rows_K = _level_rows(costs, tokens[::n_ranks], size)
    rows_DK: list[list[list[int]]] = [[] for _ in range(n_ranks)]
    pads_DK: list[list[int]] = [[] for _ in range(n_ranks)]
    load_D = [0] * n_ranks
    begin = 0
    for level, n_rows in enumerate(n_rows_K):
        end = begin + n_ranks * n_rows
        # In the first level each rank gets a row, while there are enough.
        blocks = _blocks(by_length[begin:end].tolist(), n_ranks, n_rows, spread_pads=level == 0)
        for rank, block in zip(np.argsort(load_D, kind="stable").tolist(), blocks, strict=True):
            rows_DK[rank].append(block)
            pads_DK[rank].append(n_rows - len(block))
            load_D[rank] += n_rows * costs.of(int(costs.tokens_R[block].max()) if block else costs.pad_tokens)
        begin = end
    if costs.call.ranks_meet == "micro_batch":
        return rows_DK, pads_DK
    # As in verl: a pipeline fills and drains with cheap micro-batches.
    order = [*range(len(n_rows_K))[::2][::-1], *range(len(n_rows_K))[1::2]]
    return (
        [[rows_DK[rank][level] for level in order] for rank in range(n_ranks)],
        [[pads_DK[rank][level] for level in order] for rank in range(n_ranks)],
    )


def _with_pads(costs: CallCosts, by_length: Int64s, places: int) -> Int64s:
    """Tokens of all places, longest first; a row shorter than a pad counts as a pad, as it may stand beside one."""
    pads = np.full(places - len(by_length), costs.pad_tokens, dtype=np.int64)
    return np.concatenate([np.maximum(costs.tokens_R[by_length], costs.pad_tokens), pads])


def _level_rows(costs: CallCosts, longest_T: Int64s, size: int) -> list[int]:
    """Rows of a rank's micro-batch in each level: the sizes that take least time, or little more with less memory.

    Args:
        longest_T: tokens of the longest row left when t rows of each rank are placed, for t = 0 .. size - 1.
    """
    budget = costs.call.token_budget
    if budget is None:
        return [costs.call.micro_batch_rows] * (size // costs.call.micro_batch_rows)
    best, time = _fewest(costs, longest_T, budget)
    # Time falls as blocks may be larger: find the smallest limit that costs next to no time.
    low, high = int(longest_T.max()), max(rows * int(longest_T[at]) for at, rows in _starts(best))
    while low < high:
        limit = (low + high) // 2
        n_rows_K, limited = _fewest(costs, longest_T, limit)
        if limited <= time + time // LESS_MEMORY:
            best, high = n_rows_K, limit
        else:
            low = limit + 1
    return best


def _fewest(costs: CallCosts, longest_T: Int64s, limit: int) -> tuple[list[int], int]:
    """Sizes of the levels for which a mini-batch takes the least time, with blocks of at most ``limit`` tokens.

    Dynamic programming over the rows of a rank that are placed: the time from t on is the least, over s, of a
    level of s rows, s x cost(longest left) + its handling, plus the time from t + s on. Numbers of levels are
    told apart by their remainder, as the schedule takes only multiples.
    """
    size, multiple = len(longest_T), costs.call.micro_batch_multiple
    never = np.iinfo(np.int64).max // 2
    # (t, levels from t on, modulo the multiple)
    time_TL = np.full((size + 1, multiple), never, dtype=np.int64)
    time_TL[size, 0] = 0
    n_rows_TL = np.zeros((size + 1, multiple), dtype=np.int64)
    cost_T = costs.cost_model(longest_T)
    for t in range(size - 1, -1, -1):
        most = min(size - t, limit // int(longest_T[t]))  # at least one: no row is longer than the limit
        levels_S = np.arange(1, most + 1) * cost_T[t] + costs.level
        for levels in range(multiple):
            time_S = levels_S + time_TL[t + 1 : t + most + 1, levels]
            at = int(time_S.argmin())
            after = (levels + 1) % multiple
            if time_S[at] < time_TL[t, after]:
                time_TL[t, after], n_rows_TL[t, after] = time_S[at], at + 1
    n_rows_K, t, levels = [], 0, 0
    while t < size:
        n_rows_K.append(int(n_rows_TL[t, levels]))
        t += n_rows_K[-1]
        levels = (levels - 1) % multiple
    return n_rows_K, int(time_TL[0, 0])


def _cut_cells(costs: CallCosts, by_length: Int64s, size: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Each rank gets neighbours in the order of lengths, because all its rows are padded to its longest.

    The slowest rank is the one with the longest row, whatever the others have, so there is nothing to balance.
    """
    call = costs.call
    cells = _blocks(by_length.tolist(), call.dp_size, size, spread_pads=True)
    if call.token_budget is None:
        n_micro = size // call.micro_batch_rows
    else:
        longest = max(int(costs.tokens_R[by_length[0]]), costs.pad_tokens)
        n_micro = -(-size // (call.token_budget // longest))
        n_micro = -(-n_micro // call.micro_batch_multiple) * call.micro_batch_multiple
    ends = [size * number // n_micro for number in range(n_micro + 1)]
    rows_DK = [[rows[begin:end] for begin, end in pairwise(ends)] for rows in cells]
    pads_DK = [
        [end - begin - len(rows) for (begin, end), rows in zip(pairwise(ends), n_rows_K, strict=True)]
        for n_rows_K in rows_DK
    ]
    return rows_DK, pads_DK


def _starts(n_rows_K: Sequence[int]) -> list[tuple[int, int]]:
    """(rows of a rank before a level, rows in it) of each level."""
    starts, before = [], 0
    for rows in n_rows_K:
        starts.append((before, rows))
        before += rows
    return starts


def _blocks(rows: list[int], n_blocks: int, size: int, *, spread_pads: bool) -> list[list[int]]:
    """Cuts rows, longest first, into blocks of ``size`` places; the last places of the last blocks are for pads.

    Args:
        spread_pads: no block may hold only pads while there are rows for all.
    """
    pads = n_blocks * size - len(rows)
    most = size - 1 if spread_pads else size
    pads_B = [0] * n_blocks
    for block in reversed(range(n_blocks)):
        # With fewer rows than blocks, those that are left without one hold pads alone.
        pads_B[block] = min(pads, size if block >= len(rows) else most)
        pads -= pads_B[block]
    blocks, begin = [], 0
    for held in pads_B:
        blocks.append(rows[begin : begin + size - held])
        begin += size - held
    return blocks
