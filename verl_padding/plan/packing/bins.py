"""Packs items into bins under a cap on tokens: one bin after another to the brim, or all bins alike.

Items are numbered by falling cost, the costliest is item 0; cost rises with tokens, so they are numbered by falling
tokens as well.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

Bin = list[int]


class SortedPool:
    """Items that are not packed yet; the longest that fits is found in logarithmic time.

    Taken items are skipped with the shortcuts of a union-find structure.
    """

    def __init__(self, tokens_I: Sequence[int], cost_I: Sequence[int]):
        self._tokens_I = tokens_I
        self._cost_I = cost_I
        self._falling_tokens_I = [-tokens for tokens in tokens_I]
        self._falling_cost_I = [-cost for cost in cost_I]
        self._next_I = list(range(len(tokens_I) + 1))

    def first(self, start: int = 0) -> int | None:
        """The costliest item left from ``start`` on."""
        item = start
        next_I = self._next_I
        while next_I[item] != item:
            next_I[item] = next_I[next_I[item]]
            item = next_I[item]
        return item if item < len(self._tokens_I) else None

    def take(self, item: int) -> None:
        """Takes an item off the shelf."""
        self._next_I[item] = item + 1

    def take_all(self) -> list[int]:
        """Takes what is left, costliest first."""
        items, item = [], self.first()
        while item is not None:
            items.append(item)
            self.take(item)
            item = self.first(item)
        return items

    def fill(self, items: Bin, most_tokens: int, most_cost: int | None) -> None:
        """Puts the longest item that fits into a bin, again and again.

        Long items first make a bin as costly as its tokens allow: cost rises faster than tokens.

        Args:
            items: what is in the bin; it grows.
            most_tokens: of all items of the bin.
            most_cost: of all items of the bin; None for any.
        """
        tokens = most_tokens - sum(self._tokens_I[item] for item in items)
        cost = None if most_cost is None else most_cost - sum(self._cost_I[item] for item in items)
        item = self.first()
        while item is not None:
            item = max(item, bisect_left(self._falling_tokens_I, -tokens))
            if cost is not None:
                item = max(item, bisect_left(self._falling_cost_I, -cost))
            item = self.first(item)
            if item is not None:
                items.append(item)
                self.take(item)
                tokens -= self._tokens_I[item]
                if cost is not None:
                    cost -= self._cost_I[item]


def first_fit(tokens_I: Sequence[int], cost_I: Sequence[int], token_budget: int) -> list[Bin]:
    """First-fit-decreasing: few bins, each filled to the brim in its turn."""
    shelf, bins = SortedPool(tokens_I, cost_I), []
    while (item := shelf.first()) is not None:
        shelf.take(item)
        bins.append([item])
        shelf.fill(bins[-1], token_budget, None)
    return bins


def spread(
    items: Sequence[int],
    tokens_I: Sequence[int],
    cost_I: Sequence[int],
    goal_B: Sequence[int],
    token_budget: int,
) -> list[Bin] | None:
    """Shares items out over bins, the costliest first, each to the bin that is farthest below its goal.

    With equal goals this is longest-processing-time first; items of all lengths go everywhere, so that bins hold
    about the same number of them.

    Args:
        items: the items to share out, costliest first.
        goal_B: cost that each bin should have; it may be exceeded, the token budget may not.

    Returns:
        Items of each bin, or None if an item did not fit anywhere.
    """
    bins: list[Bin] = [[] for _ in goal_B]
    tokens_left_B = [token_budget] * len(bins)
    heap = [(-goal, number) for number, goal in enumerate(goal_B)]
    heapq.heapify(heap)
    # Bins too full for the items that come now; shorter ones may fit later.
    waiting: list[tuple[int, int, int]] = []
    for item in items:
        tokens = tokens_I[item]
        while waiting and -waiting[0][0] >= tokens:
            _, above, number = heapq.heappop(waiting)
            heapq.heappush(heap, (above, number))
        while heap and tokens_left_B[heap[0][1]] < tokens:
            above, number = heapq.heappop(heap)
            heapq.heappush(waiting, (-tokens_left_B[number], above, number))
        if not heap:
            return None
        above, number = heap[0]
        bins[number].append(item)
        tokens_left_B[number] -= tokens
        heapq.heapreplace(heap, (above + cost_I[item], number))
    return bins
