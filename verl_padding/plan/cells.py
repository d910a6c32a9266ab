"""Deals the rows of each mini-batch out to the ranks, and fills the cells with pads.

Cells need equal row counts, not equal real-row counts: a rank with one long row and eleven pads is as good as one
with twelve short rows. Where micro-batches are cut by tokens, pads are nearly free, so the ranks are balanced by
cost and pads level the counts. Where micro-batches are cut by rows, each takes a pass of its own even if it holds
pads alone, so cells are as small as they can be and the ranks are balanced under that cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.balance import Bins, balance
from verl_padding.plan.cost import CostModel, Int64s
from verl_padding.plan.job import Pass
from verl_padding.plan.layout import Cell, Layout

PAD_HANDLING_TOKENS = 8
"""A pad delays the step by as much as this many tokens more on every rank would, beside the tokens it has.

It is written to the queue, fetched, and its outputs are written back, mostly one row after the other: about a tenth
of a millisecond, in which a rank trains 8 tokens or so (a model of about a billion parameters; fewer for larger ones).
"""


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """Deals rows to ranks under one cost model."""

    tokens_R: Int64s
    """Tokens of each real row of the batch."""

    cost_model: CostModel
    """Cost of a row by its tokens."""

    pad_tokens: int
    """Tokens of a pad."""

    def deal(self, rows_M: Sequence[Sequence[int]], call: Pass, mini_batch_rows: int | None = None) -> Layout:
        """The layout of a worker call.

        Args:
            rows_M: numbers of the real rows of each mini-batch, none empty.
            mini_batch_rows: rows of a mini-batch, pads among them, if they are fixed.
        """
        extra_M = [self._extra_cost(rows) for rows in rows_M]
        least = _up_to_multiple(max(-(-len(rows) // call.dp_size) for rows in rows_M), call.cell_multiple)
        if mini_batch_rows is not None:
            size = mini_batch_rows // call.dp_size
            bins_M = [balance(extra_I, call.dp_size, size) for extra_I in extra_M]
        elif call.token_budget is None:
            size = least
            bins_M = [balance(extra_I, call.dp_size, size) for extra_I in extra_M]
        else:
            size, bins_M = self._trade_pads_for_balance(extra_M, call, least)
        by_rank_M = [
            [[rows[item] for item in items] for items in bins] for rows, bins in zip(rows_M, bins_M, strict=True)
        ]
        return self._fill(by_rank_M, size, call)

    def _extra_cost(self, rows: Sequence[int]) -> Int64s:
        """What each row costs beyond the pad that would stand in its place.

        Each place of a cell costs a rank a pad at least, the same on all ranks; the rest is to be balanced.
        """
        cost_I = self.cost_model(self.tokens_R[np.asarray(rows, dtype=np.int64)])
        return np.maximum(cost_I - self._pad_cost(), 0)

    def _pad_cost(self) -> int:
        return int(self.cost_model(np.array([self.pad_tokens], dtype=np.int64))[0])

    def _trade_pads_for_balance(self, extra_M: list[Int64s], call: Pass, least: int) -> tuple[int, list[Bins]]:
        """The size of a cell, and the ranks' rows, for which the step is over first.

        Free balance asks for cells as large as the fullest rank of any mini-batch, and every cell of the call must
        then be as large: one row of 30k tokens leaves its rank with no other row, the rest of that mini-batch fills
        the other ranks, and the cells of all mini-batches grow with them. So sizes between the least and the free
        one are tried, and each is judged by the time of the slowest ranks, pads in the cells included, plus what
        the handling of all pads takes. One mini-batch of many then gives up some balance before thousands of pads
        are made, and where a long row decides the time anyway its rank takes short rows until the pads are gone.
        """
        n_cells, n_rows = len(extra_M) * call.dp_size, sum(len(extra_I) for extra_I in extra_M)
        pad_cost = self._pad_cost()
        handling = int(self.cost_model(np.array([PAD_HANDLING_TOKENS], dtype=np.int64))[0])

        def step_cost(size: int, bins_M: list[Bins]) -> int:
            pads = n_cells * size - n_rows
            slowest = sum(map(dearest, extra_M, bins_M))
            return slowest + len(extra_M) * size * pad_cost + pads * handling

        bins_M = [balance(extra_I, call.dp_size) for extra_I in extra_M]
        size = _largest(bins_M, call.cell_multiple)
        best = (step_cost(size, bins_M), size)
        best_bins_M = bins_M
        for tried in reversed(_sizes_between(least, size, call.cell_multiple)):
            # Mini-batches that fit already stay as they are.
            bins_M = [
                bins if max(map(len, bins)) <= tried else balance(extra_I, call.dp_size, tried)
                for extra_I, bins in zip(extra_M, bins_M, strict=True)
            ]
            judged = (step_cost(tried, bins_M), tried)
            if judged < best:
                best, best_bins_M = judged, bins_M
        return best[1], best_bins_M

    def _fill(self, rows_MD: list[list[list[int]]], size: int, call: Pass) -> Layout:
        """Fills the ranks' rows up to ``size`` with pads, numbered by mini-batch and rank."""
        n_rows, next_pad = len(self.tokens_R), len(self.tokens_R)
        cells_M = []
        for rows_D in rows_MD:
            cells: list[Cell] = []
            for rows in rows_D:
                pads = list(range(next_pad, next_pad + size - len(rows)))
                next_pad += len(pads)
                if call.token_budget is None:
                    cells.append(self._by_micro_batch(rows, pads, call.cell_multiple))
                else:
                    cells.append((*sorted(rows), *pads))
            cells_M.append(tuple(cells))
        return Layout(n_rows=n_rows, cells=tuple(cells_M))

    def _by_micro_batch(self, rows: list[int], pads: list[int], micro_batch: int) -> Cell:
        """Orders a cell that is cut into micro-batches of so many rows, the dearest micro-batch first.

        Micro-batches of about the same cost need the least memory; in the same order on all ranks, ranks that meet
        at every micro-batch wait least; and none is of pads alone while there are rows for all.
        """
        rows = sorted(rows)
        n_micro = (len(rows) + len(pads)) // micro_batch
        extra_I = self._extra_cost(rows)
        bins = balance(extra_I, n_micro, micro_batch)
        bins.sort(key=lambda items: -int(extra_I[items].sum()) if items else 0)
        cell: list[int] = []
        next_pad = iter(pads)
        for items in bins:
            cell += sorted(rows[item] for item in items)
            cell += [next(next_pad) for _ in range(micro_batch - len(items))]
        return tuple(cell)


def dearest(cost_I: Int64s, bins: Bins) -> int:
    """Cost of the dearest bin."""
    return max(int(cost_I[items].sum()) if items else 0 for items in bins)


def _largest(bins_M: list[Bins], multiple: int) -> int:
    return _up_to_multiple(max(len(items) for bins in bins_M for items in bins), multiple)


def _up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sizes_between(least: int, free: int, multiple: int) -> list[int]:
    """Sizes from ``least`` to below ``free``, in steps that double: least + 0, 1, 2, 4, 8 .. multiples."""
    sizes, step = [], 0
    while least + step * multiple < free:
        sizes.append(least + step * multiple)
        step = 2 * step or 1
    return sizes
