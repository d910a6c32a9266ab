"""Cuts the ranks' rows of a mini-batch into micro-batches, as many on each rank, and finds places for pads in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.calls import Pass
from verl_padding.plan.cost import CostModel, Int64s
from verl_padding.plan.layout import Cell
from verl_padding.plan.levels import LevelPacker, Levels
from verl_padding.plan.lower_bounds import micro_batch_bound
from verl_padding.plan.packing import Bin, first_fit, spread
from verl_padding.plan.polish import polish

LEVEL_HANDLING_TOKENS = 256
"""A micro-batch delays a step by as much as this many tokens more on every rank would, beside the rows in it.

Parameters are gathered for it, and kernels started, mostly while other work goes on: about a hundredth of a full
micro-batch of 16k to 32k tokens.
"""

POLISHED = 3
"""Of the ways to cut a mini-batch, so many of the best are polished; of a large one only the best."""

LARGE = 1024
"""Rows of a large mini-batch: the ways to cut it differ little once they are polished."""


@dataclass(frozen=True, kw_only=True)
class CutCells:
    """Real rows of a mini-batch, by rank and micro-batch; every rank has the same number of micro-batches."""

    rows_DK: list[list[list[int]]]
    """Row numbers of each rank's micro-batches; where there are none, pads will be."""

    time: int
    """Cost of the slowest rank, summed over the micro-batches, with the handling of those."""

    @property
    def least_rows(self) -> int:
        """Rows that a cell needs: the fullest rank's, with a pad in each micro-batch without rows."""
        return max(sum(max(len(rows), 1) for rows in rows_K) for rows_K in self.rows_DK)


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """Cuts micro-batches for one worker call, under one cost model."""

    call: Pass
    tokens_R: Int64s
    """Tokens of each real row of the batch."""

    cost_model: CostModel
    pad_tokens: int

    def level_cost(self) -> int:
        """Cost of handling a micro-batch, and of rounding it up to a bucket: half a bucket on average."""
        tokens = LEVEL_HANDLING_TOKENS + self.call.bucket_tokens // 2
        return int(self.cost_model(np.array([tokens], dtype=np.int64))[0])

    def by_level(self, rows: Sequence[int], max_pairs: int) -> tuple[list[CutCells], int]:
        """Good ways to deal a mini-batch out to ranks that meet at each micro-batch.

        Args:
            rows: real rows of the mini-batch.
            max_pairs: how long to polish, in pairs of rows compared.

        Returns:
            The ways, the best first, and a time that none can beat.
        """
        call = self.call
        assert call.token_budget is not None
        by_length = self._dearest_first(rows)
        tokens_I = self.tokens_R[by_length]
        cost_I = self.cost_model(tokens_I)
        packer = LevelPacker(
            tokens_I=tokens_I.tolist(),
            cost_I=cost_I.tolist(),
            n_ranks=call.dp_size,
            token_budget=call.token_budget,
            multiple=call.micro_batch_multiple,
            level_cost=self.level_cost(),
        )
        bound = micro_batch_bound(tokens_I, cost_I, call.dp_size, call.token_budget)
        n_polished = POLISHED if len(rows) <= LARGE else 1
        found = sorted(packer.candidates(bound), key=packer.time)[:n_polished]
        polished = [polish(levels, packer, bound, max_pairs // n_polished) for levels in found]
        row_of = by_length.tolist()
        cuts = [
            CutCells(
                rows_DK=[
                    [[row_of[item] for item in items] for items in bins_K]
                    for bins_K in _deal_levels(levels, packer.cost_I, call.dp_size)
                ],
                time=packer.time(levels),
            )
            for levels in sorted(polished, key=packer.time)
        ]
        least_levels = -(-int(tokens_I.sum()) // (call.token_budget * call.dp_size))
        return cuts, bound + least_levels * packer.level_cost

    def cut(self, cells: Sequence[Sequence[int]], size: int) -> tuple[CutCells, list[list[int]]]:
        """Cuts cells that are dealt already, each by itself, into as few micro-batches as hold all of them.

        Args:
            cells: real rows of each rank.
            size: rows of a cell, pads among them; pads are cut with the rows, so that there is room for them.

        Returns:
            The cut, and how many pads each rank's micro-batches hold.
        """
        items_D = []
        for rows in cells:
            by_length = self._dearest_first(rows)
            tokens = self.tokens_R[by_length].tolist()
            pads = size - len(rows)
            # A row may be shorter than a pad: keep falling order.
            at = len(tokens) - int(np.searchsorted(tokens[::-1], self.pad_tokens, side="left"))
            tokens[at:at] = [self.pad_tokens] * pads
            numbers: list[int | None] = list(by_length.tolist())
            numbers[at:at] = [None] * pads
            cost = self.cost_model(np.array(tokens, dtype=np.int64)).tolist()
            items_D.append((numbers, tokens, cost))
        bins_DK = self._cut_alike([(tokens, cost) for _, tokens, cost in items_D])
        rows_DK, pads_DK, load_DK = [], [], []
        for (numbers, _, cost), bins_K in zip(items_D, bins_DK, strict=True):
            in_order = _cheap_at_both_ends(bins_K, cost)
            by_number = [[numbers[item] for item in items] for items in in_order]
            rows_DK.append([[row for row in items if row is not None] for items in by_number])
            pads_DK.append([sum(row is None for row in items) for items in by_number])
            load_DK.append([sum(cost[item] for item in items) for items in in_order])
        height = int(np.array(load_DK).max(axis=0).sum())
        cut = CutCells(rows_DK=rows_DK, time=height + len(load_DK[0]) * self.level_cost())
        return cut, pads_DK

    def _dearest_first(self, rows: Sequence[int]) -> Int64s:
        numbers = np.array(rows, dtype=np.int64)
        return numbers[np.argsort(-self.tokens_R[numbers], kind="stable")]

    def _cut_alike(self, items_D: list[tuple[list[int], list[int]]]) -> list[list[Bin]]:
        """Bins of each rank, as many on all; those of a rank cost about the same."""
        budget, multiple = self.call.token_budget, self.call.micro_batch_multiple
        assert budget is not None
        tight_D = [first_fit(tokens, cost, budget) for tokens, cost in items_D]
        n_bins = -(-max(map(len, tight_D)) // multiple) * multiple
        bins_DK = []
        for (tokens, cost), tight in zip(items_D, tight_D, strict=True):
            goal = -(-sum(cost) // n_bins)
            bins = spread(range(len(tokens)), tokens, cost, [goal] * n_bins, budget)
            bins_DK.append(_split(tight, cost, n_bins) if bins is None else bins)
        return bins_DK


def _deal_levels(levels: Levels, cost_I: Sequence[int], n_ranks: int) -> list[list[Bin]]:
    """Gives each rank a bin of each level; ranks with few items so far get the bins with many."""
    dealt: list[list[Bin]] = [[] for _ in range(n_ranks)]
    standing = [(0, 0, rank) for rank in range(n_ranks)]
    for bins in levels.bins_KD:
        weighed = sorted(((len(items), sum(cost_I[item] for item in items)), items) for items in bins)
        standing.sort(reverse=True)
        for place, ((count, cost), items) in enumerate(weighed):
            items_before, cost_before, rank = standing[place]
            dealt[rank].append(items)
            standing[place] = (items_before + max(count, 1), cost_before + cost, rank)
    return dealt


def _split(bins: list[Bin], cost_I: Sequence[int], n_bins: int) -> list[Bin]:
    """Splits the dearest bins of more than one item until there are ``n_bins``."""
    bins = list(bins)
    while len(bins) < n_bins:
        dearest = max(
            (number for number, items in enumerate(bins) if len(items) > 1),
            key=lambda number: sum(cost_I[item] for item in bins[number]),
        )
        items = bins[dearest]
        bins[dearest] = items[::2]
        bins.append(items[1::2])
    return bins


def _cheap_at_both_ends(bins: list[Bin], cost_I: Sequence[int]) -> list[Bin]:
    """verl's order of micro-batches (``rearrange_micro_batches``): a pipeline fills and drains with cheap ones."""
    dear_first = sorted(bins, key=lambda items: -sum(cost_I[item] for item in items))
    return dear_first[::2][::-1] + dear_first[1::2]


def cell_of(rows_K: Sequence[Sequence[int]], pads_K: Sequence[int], next_pad: Iterator[int]) -> Cell:
    """The rows of a cell, micro-batch after micro-batch, rows before pads."""
    cell: list[int] = []
    for rows, pads in zip(rows_K, pads_K, strict=True):
        cell += sorted(rows)
        cell += [next(next_pad) for _ in range(pads)]
    return tuple(cell)
