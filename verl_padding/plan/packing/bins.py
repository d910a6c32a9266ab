"""Items in bins: packed to the brim one after another, spread over all of them alike, or balanced by exchanges.

Items that are packed by tokens are numbered by falling cost, the costliest is item 0; cost rises with tokens, so they
are numbered by falling tokens as well.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from math import inf

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.lower_bounds import mini_batch_bound

Bin = list[int]

TOLERANCE, FINE_TOLERANCE = 1 / 2048, 1 / 16384
"""The search ends this close above the lower bound: what is left to win is far below the noise of a step."""
FEW = 16
"""Up to this many items per bin, the tolerance is fine: there is more to win, and each exchange is found faster."""
MAX_PAIRS = 1 << 22
"""Pairs of items that are compared in all."""
PAIRS_OF_AN_EXCHANGE = 1 << 16
"""Pairs of items compared for one exchange: bins with the most room come first, so the best pair is among them."""
NONE = -1
"""Stands for no item, which costs nothing: the number of the last place, behind those of the items."""


def first_fit(tokens_I: Sequence[int], cost_I: Sequence[int], token_budget: int) -> list[Bin]:
    """First-fit-decreasing: few bins, each filled to the brim in its turn."""
    left, bins = list(reversed(range(len(tokens_I)))), []
    while left:
        bins.append([left.pop()])
        fill(bins[-1], left, tokens_I, cost_I, token_budget)
    return bins


def fill(
    items: Bin,
    left: list[int],
    tokens_I: Sequence[int],
    cost_I: Sequence[int],
    most_tokens: int,
    most_cost: float = inf,
) -> None:
    """Moves the longest item left that fits into a bin, again and again; ``left`` has the shortest and cheapest first.

    Long items first make a bin as costly as its tokens allow: cost rises faster than tokens.
    """
    tokens = most_tokens - sum(tokens_I[item] for item in items)
    cost = most_cost - sum(cost_I[item] for item in items)
    while n_fitting := min(
        bisect_right(left, tokens, key=tokens_I.__getitem__), bisect_right(left, cost, key=cost_I.__getitem__)
    ):
        item = left.pop(n_fitting - 1)
        items.append(item)
        tokens -= tokens_I[item]
        cost -= cost_I[item]


def spread(
    items: Sequence[int], tokens_I: Sequence[int], cost_I: Sequence[int], goal_B: Sequence[int], token_budget: int
) -> list[Bin] | None:
    """Shares items out over bins, the costliest first, each to the bin that is farthest below its goal.

    With equal goals this is longest-processing-time first; items of all lengths go everywhere, so that bins hold about
    the same number of them. A goal may be exceeded, the token budget may not: None if an item does not fit anywhere.
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


def balance(cost_I: Int64s, n_bins: int, most: int | None = None) -> list[Bin]:
    """Shares items out over bins; each bin gets at most ``most`` items.

    No bin is empty while there are at least as many items as bins. Longest-processing-time first, then moves and
    swaps that make the costliest bin cheaper. Deterministic: ties go to fewer items, then to the lower number.
    """
    n_items = len(cost_I)
    most = n_items if most is None else most
    assert most * n_bins >= n_items, f"{n_items} items do not fit into {n_bins} bins of {most}"
    ones_I = np.ones(n_items, dtype=np.int64)
    # By cost, then by number of items: no bin stays empty because others hold items that cost nothing.
    with_count_I = [cost * (n_items + 1) + 1 for cost in cost_I.tolist()]
    costliest_first = np.argsort(-cost_I, kind="stable").tolist()
    bins = spread(costliest_first, ones_I.tolist(), with_count_I, [0] * n_bins, most)
    assert bins is not None
    goal = mini_batch_bound(cost_I, n_bins)
    goal += int(goal * (FINE_TOLERANCE if n_items <= FEW * n_bins else TOLERANCE))
    return exchange(bins, ones_I, cost_I, token_budget=most, n_levels=1, goal=goal, max_pairs=MAX_PAIRS)


def exchange(
    bins: Sequence[Bin],
    tokens_I: Int64s,
    cost_I: Int64s,
    *,
    token_budget: int,
    n_levels: int,
    goal: int,
    max_pairs: int,
) -> list[Bin]:
    """Exchanges items between bins while that lowers a level.

    An exchange moves one item, or swaps two; it raises no level, keeps the token budget, and empties no bin.

    Args:
        bins: those of the first level, then those of the next; all levels have equally many.
        goal: height of all levels together at which to end.
        max_pairs: pairs of items to compare, one exchange at a time.
    """
    search = _Search(bins, tokens_I, cost_I, token_budget, n_levels)
    level = 0
    while level < n_levels and search.pairs < max_pairs and search.heights().sum() > goal:
        if not search.lower(level):
            level += 1
    return search.bins


class _Search:
    def __init__(self, bins: Sequence[Bin], tokens_I: Int64s, cost_I: Int64s, token_budget: int, n_levels: int):
        self.bins = [list(items) for items in bins]
        self.pairs = 0
        self._tokens_I, self._cost_I = np.append(tokens_I, 0), np.append(cost_I, 0)
        self._budget, self._n_levels = token_budget, n_levels
        self._load_B = np.array([cost_I[items].sum() for items in self.bins], dtype=np.int64)
        self._used_B = np.array([tokens_I[items].sum() for items in self.bins], dtype=np.int64)
        self._count_B = np.array([len(items) for items in self.bins])
        self._level_B = np.arange(len(bins)) // (len(bins) // n_levels)

    def heights(self) -> Int64s:
        """Cost of the costliest bin of each level."""
        return self._load_B.reshape(self._n_levels, -1).max(axis=1)

    def lower(self, level: int) -> bool:
        """Makes the exchange that leaves the level's costliest bin, and its partner, cheapest; False if none helps."""
        of_level = np.flatnonzero(self._level_B == level)
        costliest = int(of_level[self._load_B[of_level].argmax()])
        out_J = np.array(self.bins[costliest], dtype=np.int64)
        # In its own level a bin must stay below the height that is to fall, elsewhere it may reach its level's.
        room_B = self.heights()[self._level_B] - (self._level_B == level) - self._load_B
        # Bins with the most room first, while they hold so many items together that few enough pairs are compared.
        order = np.argsort(-room_B, kind="stable")
        candidates_B = self._count_B[order] + 1
        few_B = np.cumsum(candidates_B) - candidates_B <= PAIRS_OF_AN_EXCHANGE // max(len(out_J), 1)
        partners = order[few_B & (room_B[order] > 0)].tolist()
        # Of a partner, an item comes back, or none, unless that leaves the giver empty.
        backs = [[*self.bins[number], NONE] if len(out_J) > 1 else self.bins[number] for number in partners]
        back_I = np.array([item for items in backs for item in items], dtype=np.int64)
        partner_I = np.repeat(np.array(partners, dtype=np.int64), [len(items) for items in backs])
        change_JI = self._cost_I[out_J][:, None] - self._cost_I[back_I]
        grows_JI = self._tokens_I[out_J][:, None] - self._tokens_I[back_I]
        self.pairs += change_JI.size
        helps_JI = (
            (change_JI > 0)
            & (change_JI <= room_B[partner_I])
            & (self._used_B[partner_I] + grows_JI <= self._budget)
            & (self._used_B[costliest] - grows_JI <= self._budget)
        )
        if not helps_JI.any():
            return False
        # A bin of another level may fill up unseen, one of this level may become its costliest.
        after_JI = np.where(self._level_B[partner_I] == level, self._load_B[partner_I] + change_JI, 0)
        costlier_JI = np.maximum(self._load_B[costliest] - change_JI, after_JI)
        costlier_JI[~helps_JI] = np.iinfo(np.int64).max
        at_out, at_back = divmod(int(costlier_JI.argmin()), len(back_I))
        self._move(int(out_J[at_out]), costliest, int(partner_I[at_back]))
        if back_I[at_back] != NONE:
            self._move(int(back_I[at_back]), int(partner_I[at_back]), costliest)
        return True

    def _move(self, item: int, source: int, target: int) -> None:
        self.bins[source].remove(item)
        self.bins[target].append(item)
        for number, sign in ((source, -1), (target, 1)):
            self._load_B[number] += sign * self._cost_I[item]
            self._used_B[number] += sign * self._tokens_I[item]
            self._count_B[number] += sign
