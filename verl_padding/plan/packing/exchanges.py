"""Lowers the costliest bins, one exchange at a time: of levels of micro-batches, or of the ranks of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.packing.bins import Bin

NONE = -1
"""Stands for no item, which costs nothing: the number of the last place, behind those of the items."""

PAIRS_OF_AN_EXCHANGE = 1 << 16
"""Pairs of items compared for one exchange: bins with the most room come first, so the best pair is among them."""


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
        token_budget: most tokens of a bin.
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
        partners = self._partners(room_B, PAIRS_OF_AN_EXCHANGE // max(len(out_J), 1))
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

    def _partners(self, room_B: Int64s, most_items: int) -> list[int]:
        """Bins that may become costlier, those with the most room first, while they hold ``most_items`` together."""
        partners, items = [], 0
        for number in np.argsort(-room_B, kind="stable").tolist():
            if room_B[number] <= 0 or items > most_items:
                break
            partners.append(number)
            items += len(self.bins[number]) + 1
        return partners

    def _move(self, item: int, source: int, target: int) -> None:
        self.bins[source].remove(item)
        self.bins[target].append(item)
        for number, sign in ((source, -1), (target, 1)):
            self._load_B[number] += sign * self._cost_I[item]
            self._used_B[number] += sign * self._tokens_I[item]
