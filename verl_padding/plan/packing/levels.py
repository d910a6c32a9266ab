"""Cuts a mini-batch into levels: micro-batch k of all ranks, which synchronous ranks begin and end together.

FSDP gathers parameters in each micro-batch, so ranks wait for each other in each. The height of a level is the cost of
its costliest bin; a mini-batch takes the sum of the heights, and a little more for each level. Two things keep that
low: few levels, and bins of one level that cost the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import Int64s
from verl_padding.plan.packing.bins import Bin, SortedPool, first_fit, spread
from verl_padding.plan.packing.exchanges import exchange

MORE_LEVELS = 3
"""How many larger numbers of levels are tried than the least: one more costs its handling, but may fit rows better."""

PASSES = 3
"""Times the light levels' common height is guessed, each time from what the pass before put elsewhere."""


def good_enough(bound: int, n_items: int) -> int:
    """Height at which a search may end: a thousandth above the lower bound, up to a hundredth for many thousand items.

    A search takes time with the items, and many of them are packed well at the first attempt.
    """
    return bound + bound * min(max(n_items, 1 << 11), 1 << 14) // (1 << 21)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Items of a mini-batch, by level and bin; a bin is a rank's micro-batch, but which rank's is not yet decided."""

    bins_KD: list[list[Bin]]
    """Bins of each level; both levels and the bins in them from costly to cheap."""

    height: int
    """Cost of the costliest bin, summed over the levels."""

    @classmethod
    def of_bins(cls, bins: list[Bin], cost_I: Sequence[int], n_ranks: int, multiple: int) -> Levels:
        """Groups bins into levels so that the heights are least: neighbours by cost, one bin a rank.

        Args:
            multiple: the number of levels is a multiple of it; bins without items fill the last ones.
        """
        load_B = [sum(cost_I[item] for item in items) for items in bins]
        order = sorted(range(len(bins)), key=lambda number: -load_B[number])
        n_levels = -(-len(bins) // (n_ranks * multiple)) * multiple
        ordered = [bins[number] for number in order] + [[] for _ in range(n_levels * n_ranks - len(bins))]
        return cls(
            bins_KD=[ordered[level * n_ranks : (level + 1) * n_ranks] for level in range(n_levels)],
            height=sum(load_B[number] for number in order[::n_ranks]),
        )


class LevelPacker:
    """Packs the rows of a mini-batch into levels.

    Args:
        items: the row of each item, the longest first; of a chain, it is the tip.
    """

    def __init__(self, costs: CallCosts, items: Int64s):
        assert costs.call.token_budget is not None
        self.tokens_I: list[int] = costs.tokens_R[items].tolist()
        self.cost_I: list[int] = costs.cost_R[items].tolist()
        self.n_ranks, self.token_budget = costs.call.dp_size, costs.call.token_budget
        self.multiple = costs.call.micro_batch_multiple
        """The number of levels is a multiple of it."""
        self._handling = costs.level

    def candidates(self, bound: int) -> Iterator[Levels]:
        """Good ways to cut the levels, until one is good enough; ``bound`` is the least height there is."""
        goal = good_enough(bound, len(self.cost_I))
        best: int | None = None
        if len(self.tokens_I) >= self.n_ranks:
            bins = first_fit(self.tokens_I, self.cost_I, self.token_budget)
            if len(bins) >= self.n_ranks:  # else some rank would have no item in any level
                yield self._levels(bins)
        least = -(-sum(self.tokens_I) // (self.token_budget * self.n_ranks)) or 1
        n_levels, successes = -(-least // self.multiple) * self.multiple, 0
        while successes <= MORE_LEVELS and n_levels <= len(self.tokens_I) + self.multiple:
            if best is not None and bound + n_levels * self._handling >= best:
                return  # not even a perfect cut into so many levels would be better
            found = self._pack(n_levels)
            yield from found
            best = min([self.time(levels) for levels in found] + ([] if best is None else [best]), default=None)
            if any(levels.height <= goal for levels in found):
                return
            successes += bool(found)
            n_levels += self.multiple

    def polish(self, levels: Levels, bound: int, max_pairs: int) -> Levels:
        """Lowers the levels by exchanges between their bins, until they are good enough."""
        bins = exchange(
            [items for level in levels.bins_KD for items in level],
            np.array(self.tokens_I, dtype=np.int64),
            np.array(self.cost_I, dtype=np.int64),
            token_budget=self.token_budget,
            n_levels=len(levels.bins_KD),
            goal=good_enough(bound, len(self.cost_I)),
            max_pairs=max_pairs,
        )
        return self._levels(bins)

    def time(self, levels: Levels) -> int:
        """What a mini-batch costs, cut like this."""
        return levels.height + len(levels.bins_KD) * self._handling

    def _levels(self, bins: list[Bin]) -> Levels:
        return Levels.of_bins(bins, self.cost_I, self.n_ranks, self.multiple)

    def _pack(self, n_levels: int) -> list[Levels]:
        """Packs into ``n_levels`` levels: heavy ones, as high as their longest row, and light ones of one height.

        A row costlier than the levels' mean makes its level a heavy one. The other bins of a heavy level can be
        filled as high as it only with long rows, for many short ones exceed the token budget first. Two ways: fill
        heavy levels bin by bin, then the rest into the light ones; or let all bins take turns, which leaves them
        with more equal numbers of rows.
        """
        ways = [self._pack_heavy_first(n_levels)]
        if self._first_is_heavy(n_levels):
            ways.append(self._pack_together(n_levels))
        return [levels for levels in ways if levels is not None]

    def _first_is_heavy(self, n_levels: int) -> bool:
        return n_levels > 1 and self.cost_I[0] * n_levels * self.n_ranks > sum(self.cost_I)

    def _pack_heavy_first(self, n_levels: int) -> Levels | None:
        shelf = SortedPool(self.tokens_I, self.cost_I)
        rest, heavy_bins = sum(self.cost_I), []
        level = 0
        while level < n_levels - 1:
            item = shelf.first()
            if item is None or self.cost_I[item] * (n_levels - level) * self.n_ranks <= rest:
                break
            bins = self._fill_level(shelf, self.cost_I[item], level)
            rest -= sum(self.cost_I[item] for items in bins for item in items)
            heavy_bins += bins
            level += 1
        items = shelf.take_all()
        n_light = n_levels - level
        goal = rest // (n_light * self.n_ranks)
        light_bins = spread(items, self.tokens_I, self.cost_I, [goal] * (n_light * self.n_ranks), self.token_budget)
        return None if light_bins is None else self._levels(heavy_bins + light_bins)

    def _fill_level(self, shelf: SortedPool, height: int, level: int) -> list[Bin]:
        bins: list[Bin] = [[] for _ in range(self.n_ranks)]
        if level == 0:
            # One for each first, so that no rank is without an item while there are enough.
            for items in bins:
                item = shelf.first()
                if item is not None:
                    shelf.take(item)
                    items.append(item)
        for items in bins:
            shelf.fill(items, self.token_budget, height)
        return bins

    def _pack_together(self, n_levels: int) -> Levels | None:
        cost_I, n_ranks = self.cost_I, self.n_ranks
        heads = [cost_I[level * n_ranks] if level * n_ranks < len(cost_I) else 0 for level in range(n_levels)]
        total = sum(cost_I)
        n_heavy, rest = 0, total
        while n_heavy < n_levels - 1 and heads[n_heavy] * n_ranks * (n_levels - n_heavy) > rest:
            rest -= n_ranks * heads[n_heavy]
            n_heavy += 1
        best: Levels | None = None
        for _ in range(PASSES if n_heavy else 1):
            light = max(rest, 0) // (n_ranks * (n_levels - n_heavy))
            goal_B = [max(head, light) for head in heads for _ in range(n_ranks)]
            bins = spread(range(len(cost_I)), self.tokens_I, cost_I, goal_B, self.token_budget)
            if bins is None:
                break
            levels = self._levels(bins)
            if best is None or levels.height < best.height:
                best = levels
            # Heavy bins take less than their height where the token budget stops them: the rest is for the light.
            rest = total - sum(cost_I[item] for items in bins[: n_heavy * n_ranks] for item in items)
        return best
