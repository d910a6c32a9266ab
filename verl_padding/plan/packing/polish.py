"""Lowers the levels of a packed mini-batch, one exchange at a time between the costliest bin and any other."""

from __future__ import annotations

import numpy as np

from verl_padding.plan.cost import Int64s
from verl_padding.plan.packing.levels import LevelPacker, Levels, good_enough


def polish(levels: Levels, packer: LevelPacker, bound: int, max_pairs: int) -> Levels:
    """Exchanges items between bins while that lowers a level.

    An exchange moves one item, or swaps two; it raises no level, keeps the token budget, and empties no bin.

    Args:
        bound: least height there is.
        max_pairs: pairs of items to compare, one exchange at a time.
    """
    search = _Search(levels, packer)
    goal = good_enough(bound, len(packer.cost_I))
    level = 0
    while level < search.n_levels and search.pairs < max_pairs and search.height() > goal:
        if not search.lower(level):
            level += 1
    return search.levels()


class _Search:
    def __init__(self, levels: Levels, packer: LevelPacker):
        self.n_levels, self._n_ranks = len(levels.bins_KD), packer.n_ranks
        self.pairs = 0
        self._packer = packer
        self._tokens_I = np.array(packer.tokens_I, dtype=np.int64)
        self._cost_I = np.array(packer.cost_I, dtype=np.int64)
        self._bins = [list(items) for level in levels.bins_KD for items in level]
        self._bin_I = np.empty(len(self._cost_I), dtype=np.int64)
        for number, items in enumerate(self._bins):
            self._bin_I[items] = number
        self._load_B = np.array([self._cost_I[items].sum() for items in self._bins], dtype=np.int64)
        self._used_B = np.array([self._tokens_I[items].sum() for items in self._bins], dtype=np.int64)
        self._level_B = np.repeat(np.arange(self.n_levels), self._n_ranks)

    def height(self) -> int:
        return int(self._heights().sum())

    def levels(self) -> Levels:
        packer = self._packer
        return Levels.of_bins(self._bins, packer.cost_I, packer.n_ranks, packer.multiple)

    def lower(self, level: int) -> bool:
        """Makes the exchange that leaves the level's costliest bin, and its partner, cheapest; False if none helps."""
        n_ranks, budget = self._n_ranks, self._packer.token_budget
        costliest = level * n_ranks + int(self._load_B[level * n_ranks : (level + 1) * n_ranks].argmax())
        load, used = self._load_B[costliest], self._used_B[costliest]
        # In its own level a bin must stay below the height that is to fall, elsewhere it may reach its level's.
        limit_B = self._heights()[self._level_B] - (self._level_B == level)
        out_J = np.array(self._bins[costliest], dtype=np.int64)
        back_I = np.flatnonzero(self._bin_I != costliest)
        # A bin may also take an item and give none back, unless that leaves the giver empty.
        takers = np.flatnonzero(np.arange(len(self._bins)) != costliest) if len(out_J) > 1 else out_J[:0]
        partner_I = np.concatenate([self._bin_I[back_I], takers])
        none_I = np.zeros_like(takers)
        change_JI = self._cost_I[out_J][:, None] - np.concatenate([self._cost_I[back_I], none_I])
        grows_JI = self._tokens_I[out_J][:, None] - np.concatenate([self._tokens_I[back_I], none_I])
        self.pairs += change_JI.size
        after_JI = self._load_B[partner_I] + change_JI
        helps_JI = (
            (change_JI > 0)
            & (after_JI <= limit_B[partner_I])
            & (self._used_B[partner_I] + grows_JI <= budget)
            & (used - grows_JI <= budget)
        )
        if not helps_JI.any():
            return False
        # A bin of another level may fill up unseen, one of this level may become its costliest.
        same_I = self._level_B[partner_I] == level
        costlier_JI = np.maximum(load - change_JI, np.where(same_I, after_JI, 0))
        costlier_JI[~helps_JI] = np.iinfo(np.int64).max
        at_out, at_back = divmod(int(costlier_JI.argmin()), len(partner_I))
        partner = int(partner_I[at_back])
        self._move(int(out_J[at_out]), partner)
        if at_back < len(back_I):
            self._move(int(back_I[at_back]), costliest)
        return True

    def _heights(self) -> Int64s:
        return self._load_B.reshape(self.n_levels, self._n_ranks).max(axis=1)

    def _move(self, item: int, target: int) -> None:
        source = int(self._bin_I[item])
        self._bins[source].remove(item)
        self._bins[target].append(item)
        self._bin_I[item] = target
        for number, sign in ((source, -1), (target, 1)):
            self._load_B[number] += sign * self._cost_I[item]
            self._used_B[number] += sign * self._tokens_I[item]
