"""Deals the rows of each mini-batch out to the ranks, and fills the cells with pads.

Cells need equal row counts, not equal real-row counts: a rank with one long row and eleven pads is as good as one
with twelve short rows. Where micro-batches are cut by tokens, pads are nearly free, so the ranks are balanced by
cost and pads level the counts. Where micro-batches are cut by rows, each takes a pass of its own even if it holds
pads alone, so cells are as small as they can be and the ranks are balanced under that cap. Where the engine pads rows,
a pad costs as much as the longest row beside it, so cells are as small as they can be there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from verl_padding.plan.balance import Bins, balance
from verl_padding.plan.calls import Pass
from verl_padding.plan.cost import CostModel, Int64s
from verl_padding.plan.fitting import Fitter
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout
from verl_padding.plan.micro_batches import CutCells, Cutter, cell_of
from verl_padding.plan.rectangles import RectangleCutter

PAD_HANDLING_TOKENS = 8
"""A pad delays the step by as much as this many tokens more on every rank would, beside the tokens it has.

It is written to the queue, fetched, and its outputs are written back, mostly one row after the other: about a tenth
of a millisecond, in which a rank trains 8 tokens or so (a model of about a billion parameters; fewer for larger ones).
"""

POLISH_PAIRS = 1 << 22
"""How long the micro-batches of one call are polished, in pairs of rows compared: about a tenth of a second."""


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """Deals rows to ranks for one worker call, under one cost model."""

    call: Pass
    packer: Packer
    """Who cuts micro-batches by tokens: verl, or the plan."""

    tokens_R: Int64s
    """Tokens of each real row of the batch."""

    cost_model: CostModel
    """Cost of a row by its tokens."""

    pad_tokens: int
    """Tokens of a pad."""

    def deal(self, rows_M: Sequence[Sequence[int]], mini_batch_rows: int | None = None) -> Layout:
        """The layout of the call.

        Args:
            rows_M: numbers of the real rows of each mini-batch, none empty.
            mini_batch_rows: rows of a mini-batch, pads among them, if they are fixed.
        """
        call = self.call
        least = _up_to_multiple(max(-(-len(rows) // call.dp_size) for rows in rows_M), call.cell_multiple)
        size = least if mini_batch_rows is None else mini_batch_rows // call.dp_size
        if call.padded_to != "row":
            return self._deal_rectangles(rows_M, size)
        extra_M = [self._extra_cost(rows) for rows in rows_M]
        if mini_batch_rows is not None or call.token_budget is None:
            bins_M = [balance(extra_I, call.dp_size, size) for extra_I in extra_M]
        else:
            size, bins_M = self._trade_pads_for_balance(extra_M, least)
        rows_MD = [
            [[rows[item] for item in items] for items in bins] for rows, bins in zip(rows_M, bins_M, strict=True)
        ]
        if call.token_budget is None:
            return self._cut_by_rows(rows_MD, size)
        if self.packer == "verl":
            return self._leave_to_verl(rows_MD, size)
        if call.ranks_meet == "mini_batch":
            cut_M = [self._cutter.cut(rows_D, size) for rows_D in rows_MD]
            return self._layout([cut for cut, _ in cut_M], [pads_DK for _, pads_DK in cut_M])
        return self._cut_by_level(rows_M, rows_MD, size, may_grow=mini_batch_rows is None)

    @property
    def _cutter(self) -> Cutter:
        return Cutter(call=self.call, tokens_R=self.tokens_R, cost_model=self.cost_model, pad_tokens=self.pad_tokens)

    def _extra_cost(self, rows: Sequence[int]) -> Int64s:
        """What each row costs beyond the pad that would stand in its place.

        Each place of a cell costs a rank a pad at least, the same on all ranks; the rest is to be balanced.
        """
        cost_I = self.cost_model(self.tokens_R[np.asarray(rows, dtype=np.int64)])
        return np.maximum(cost_I - self._cost_of(self.pad_tokens), 0)

    def _cost_of(self, tokens: int) -> int:
        return int(self.cost_model(np.array([tokens], dtype=np.int64))[0])

    def _pads_time(self, size: int, n_mini_batches: int) -> int:
        """What the pads of a call delay it by, with cells of ``size`` rows."""
        pads = n_mini_batches * self.call.dp_size * size - len(self.tokens_R)
        return n_mini_batches * size * self._cost_of(self.pad_tokens) + pads * self._cost_of(PAD_HANDLING_TOKENS)

    def _trade_pads_for_balance(self, extra_M: list[Int64s], least: int) -> tuple[int, list[Bins]]:
        """The size of a cell, and the ranks' rows, for which the step is over first.

        Free balance asks for cells as large as the fullest rank of any mini-batch, and every cell of the call must
        then be as large: one row of 30k tokens leaves its rank with no other row, the rest of that mini-batch fills
        the other ranks, and the cells of all mini-batches grow with them. So sizes between the least and the free
        one are tried, and each is judged by the time of the slowest ranks, pads in the cells included, plus what
        the handling of all pads takes. One mini-batch of many then gives up some balance before thousands of pads
        are made, and where a long row decides the time anyway its rank takes short rows until the pads are gone.
        """
        n_ranks, multiple = self.call.dp_size, self.call.cell_multiple

        def step_cost(size: int, bins_M: list[Bins]) -> int:
            return sum(map(dearest, extra_M, bins_M)) + self._pads_time(size, len(extra_M))

        bins_M = [balance(extra_I, n_ranks) for extra_I in extra_M]
        size = _up_to_multiple(max(len(items) for bins in bins_M for items in bins), multiple)
        best = (step_cost(size, bins_M), size)
        best_bins_M = bins_M
        for tried in reversed(_sizes_between(least, size, multiple)):
            # Mini-batches that fit already stay as they are.
            bins_M = [
                bins if max(map(len, bins)) <= tried else balance(extra_I, n_ranks, tried)
                for extra_I, bins in zip(extra_M, bins_M, strict=True)
            ]
            judged = (step_cost(tried, bins_M), tried)
            if judged < best:
                best, best_bins_M = judged, bins_M
        return best[1], best_bins_M

    def _deal_rectangles(self, rows_M: Sequence[Sequence[int]], size: int) -> Layout:
        cutter = RectangleCutter(
            call=self.call,
            tokens_R=self.tokens_R,
            cost_model=self.cost_model,
            pad_tokens=self.pad_tokens,
            level_cost=self._cutter.level_cost(),
        )
        cut_M = [cutter.cut(rows, size) for rows in rows_M]
        return self._layout([CutCells(rows_DK=rows_DK, time=0) for rows_DK, _ in cut_M], [pads for _, pads in cut_M])

    def _leave_to_verl(self, rows_MD: list[list[list[int]]], size: int) -> Layout:
        next_pad = count(len(self.tokens_R))
        cells = tuple(tuple(cell_of([rows], [size - len(rows)], next_pad) for rows in rows_D) for rows_D in rows_MD)
        return Layout(n_rows=len(self.tokens_R), cells=cells)

    def _cut_by_rows(self, rows_MD: list[list[list[int]]], size: int) -> Layout:
        """Cuts cells into micro-batches of so many rows, the dearest micro-batch first.

        Micro-batches of about the same cost need the least memory; in the same order on all ranks, ranks that meet
        at every micro-batch wait least; and none is of pads alone while there are rows for all.
        """
        micro_rows = self.call.micro_batch_rows
        cut_M, pads_M = [], []
        for rows_D in rows_MD:
            by_rank = []
            for rows in rows_D:
                extra_I = self._extra_cost(rows)
                bins = balance(extra_I, size // micro_rows, micro_rows)
                bins = [bins[number] for number in np.argsort([-extra_I[items].sum() for items in bins], kind="stable")]
                by_rank.append([[rows[item] for item in items] for items in bins])
            cut_M.append(CutCells(rows_DK=by_rank, time=0))
            pads_M.append([[micro_rows - len(rows) for rows in rows_K] for rows_K in by_rank])
        return self._layout(cut_M, pads_M)

    def _cut_by_level(
        self, rows_M: Sequence[Sequence[int]], rows_MD: list[list[list[int]]], size: int, *, may_grow: bool
    ) -> Layout:
        """Cuts mini-batches for ranks that meet at every micro-batch, with cells of the size that is over first.

        Cells of all mini-batches are of one size, so each mini-batch offers several cuts and the size decides
        which of them fit. Cutting the balanced cells ``rows_MD`` always fits, from their ``size`` on.
        """
        cutter, n_mini = self._cutter, len(rows_M)
        fitter = Fitter(
            call=self.call,
            tokens_R=self.tokens_R,
            cost_model=self.cost_model,
            pad_tokens=self.pad_tokens,
            level_cost=cutter.level_cost(),
        )
        offers_M = [cutter.by_level(rows, POLISH_PAIRS // n_mini) for rows in rows_M]
        least_time = sum(min((cut.time for cut in cuts), default=0) for cuts, _ in offers_M)
        sizes = {size}
        if may_grow:
            multiple = self.call.cell_multiple
            needed = {_up_to_multiple(cut.least_rows, multiple) for cuts, _ in offers_M for cut in cuts}
            sizes |= {rows for rows in needed if rows > size}
            sizes |= set(_sizes_between(size, max(sizes), multiple))
        best: tuple[int, list[CutCells], list[list[list[int]]]] | None = None
        for tried in sorted(sizes):
            if best is not None and least_time + self._pads_time(tried, n_mini) >= best[0]:
                break  # more rows cannot pay for their handling
            fitted_M = [
                _fit(cutter, fitter, cuts, least_time, rows_D, tried)
                for (cuts, least_time), rows_D in zip(offers_M, rows_MD, strict=True)
            ]
            time = sum(cut.time for cut, _ in fitted_M) + self._pads_time(tried, n_mini)
            if best is None or time < best[0]:
                best = (time, [cut for cut, _ in fitted_M], [pads_DK for _, pads_DK in fitted_M])
        assert best is not None
        return self._layout(best[1], best[2])

    def _layout(self, cut_M: Sequence[CutCells], pads_MDK: Sequence[list[list[int]]]) -> Layout:
        """Numbers the pads, by mini-batch, rank and micro-batch."""
        next_pad = count(len(self.tokens_R))
        cells, micro_rows = [], []
        for cut, pads_DK in zip(cut_M, pads_MDK, strict=True):
            ranks = list(zip(cut.rows_DK, pads_DK, strict=True))
            cells.append(tuple(cell_of(rows_K, pads_K, next_pad) for rows_K, pads_K in ranks))
            micro_rows.append(
                tuple(
                    tuple(len(rows) + pads for rows, pads in zip(rows_K, pads_K, strict=True))
                    for rows_K, pads_K in ranks
                )
            )
        return Layout(n_rows=len(self.tokens_R), cells=tuple(cells), micro_batch_rows=tuple(micro_rows))


def _fit(
    cutter: Cutter, fitter: Fitter, cuts: list[CutCells], least_time: int, rows_D: list[list[int]], size: int
) -> tuple[CutCells, list[list[int]]]:
    """The best cut for cells of ``size`` rows, and how many pads each rank's micro-batches hold.

    Args:
        cuts: ways to cut the mini-batch, the best first.
        least_time: what none can beat.
        rows_D: balanced cells of the mini-batch, to be cut if no way fits, or none well.
    """
    best: tuple[CutCells, list[list[int]]] | None = None
    for cut in cuts:
        if best is not None and cut.time >= best[0].time:
            break
        fitted = fitter.fit(cut, size)
        if fitted is not None and (best is None or fitted[0].time < best[0].time):
            best = fitted
    if best is None or best[0].time > least_time + least_time // 64:
        balanced = cutter.cut(rows_D, size)
        if best is None or balanced[0].time < best[0].time:
            best = balanced
    return best


def dearest(cost_I: Int64s, bins: Bins) -> int:
    """Cost of the dearest bin."""
    return max(int(cost_I[items].sum()) if items else 0 for items in bins)


def _up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sizes_between(least: int, free: int, multiple: int) -> list[int]:
    """Sizes from ``least`` to below ``free``, in steps that double: least + 0, 1, 2, 4, 8 .. multiples."""
    sizes, step = [], 0
    while least + step * multiple < free:
        sizes.append(least + step * multiple)
        step = 2 * step or 1
    return sizes
