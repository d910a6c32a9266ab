"""Items in bins: one filled to the brim, or spread over all of them alike.

Items that are packed by tokens are numbered by falling cost, the costliest is item 0; cost rises
with tokens, so they are numbered by falling tokens as well.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from verl_padding.plan.cost import Int64s

Bin = list[int]


def fill_bin(
    items: Bin,
    left: list[int],
    tokens_I: Sequence[int],
    cost_I: Sequence[int],
    max_tokens: int,
    max_cost: int,
) -> None:
    """Moves the longest item left that fits into a bin, again and again; ``left`` has the shortest
    and cheapest first.

    Long items first make a bin as costly as its tokens allow: cost rises faster than tokens.
    """
    # 3 2 1 are left and a bin has room for 5: it takes 3, then 2.
    tokens_left = max_tokens - sum(tokens_I[item] for item in items)
    cost_left = max_cost - sum(cost_I[item] for item in items)
    while n_fitting := min(
        bisect_right(left, tokens_left, key=tokens_I.__getitem__),
        bisect_right(left, cost_left, key=cost_I.__getitem__),
    ):
        item = left.pop(n_fitting - 1)
        items.append(item)
        tokens_left -= tokens_I[item]
        cost_left -= cost_I[item]


def spread(
    items: Sequence[int],
    tokens_I: Sequence[int],
    cost_I: Sequence[int],
    goal_B: Sequence[int],
    token_budget: int,
) -> list[Bin] | None:
    """Shares items out over bins, the costliest first, each to the bin that is farthest below its
    goal.

    With equal goals this is longest-processing-time first; items of all lengths go everywhere, so
    that bins hold about the same number of them. A goal may be exceeded, the token budget may not:
    None if an item does not fit anywhere.
    """
    # Costs 5 4 3 3 and goals 8 and 7: 5 to the first bin, 4 to the second, which is 7 below its
    # goal, then 3 to each, which are both 3 below.
    bins: list[Bin] = [[] for _ in goal_B]
    tokens_left_B = [token_budget] * len(bins)
    # Bins by cost above the goal, which is negative at first; the lowest is on top.
    heap = [(-goal, number) for number, goal in enumerate(goal_B)]
    heapq.heapify(heap)
    # Bins too full for the items that come now, by tokens left; shorter items may fit later.
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


def balance(cost_I: Int64s, n_bins: int, max_items: int) -> list[Bin]:
    """Shares items out over bins, the costliest first, each to the cheapest bin; a bin gets at most
    ``max_items``.

    No bin is empty while there are at least as many items as bins. Deterministic: ties go to fewer
    items, then to the lower number.
    """
    n_items = len(cost_I)
    # By cost, then by number of items: no bin stays empty because others hold items that cost
    # nothing. Each item takes one "token", so that the budget of a bin is its number of items.
    with_count_I = [cost * (n_items + 1) + 1 for cost in cost_I.tolist()]
    costliest_first = np.argsort(-cost_I, kind="stable").tolist()
    bins = spread(costliest_first, [1] * n_items, with_count_I, [0] * n_bins, max_items)
    assert bins is not None, f"{n_items} items for {n_bins} bins of {max_items}"
    return bins
