"""Laps: what each micro-batch took on each rank, and their figures."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.cost import CostModel


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One micro-batch on one rank, backward pass included: from its start to that of the next one, or the call's end.

    In a pipeline, where the passes of micro-batches alternate, a lap is a whole mini-batch.
    """

    call: str
    rank: int
    """Data-parallel rank."""
    mini_batch: int
    """Its number in the call, from 0; with several epochs they go on counting."""
    micro_batch: int
    """Its number in the mini-batch, from 0."""
    start_s: float
    """When it began, in seconds since the epoch, by the clock of the rank's node."""
    seconds: float
    """How long it took, with what the rank waited for others."""
    forward_s: float | None
    """How long its forward pass took of these; in an update the rest is the backward pass. None in a pipeline."""
    busy_s: float | None
    """How long the rank computed; None where that cannot be told apart (a GPU, or a CPU with several threads)."""
    rows: tuple[int, ...]
    """Numbers of its real rows in the batch."""
    pads: int
    computed_tokens: tuple[int, ...]
    """Tokens of each row that was computed, pads among them; of rows that extend each other only the longest is."""
    reserved_bytes: int
    """Most memory that the process has held since the call began: reserved on the device, or resident on a CPU."""
    allocated_bytes: int | None
    """Most memory that tensors have held on the device since the call began; None on a CPU."""
    shared_tokens: tuple[int, ...] = ()
    """How many of each computed row's tokens were computed in another one; empty where rows do not part."""

    @property
    def tokens(self) -> int:
        """Tokens that were computed."""
        return sum(self.computed_tokens) - sum(self.shared_tokens)

    @property
    def known_busy_s(self) -> float:
        """``busy_s``, or all its seconds where that is not known."""
        return self.seconds if self.busy_s is None else self.busy_s

    def cost(self, cost_model: CostModel) -> int:
        """What the plan reckons for its rows and pads."""
        shared = [tokens for tokens in self.shared_tokens if tokens]
        computed, elsewhere = (np.array(tokens, dtype=np.int64) for tokens in (self.computed_tokens, shared))
        return int(cost_model(computed).sum() - cost_model(elsewhere).sum())


def laps_by_call(laps: Iterable[Lap]) -> dict[str, list[Lap]]:
    """The laps of each call, calls and laps in the order in which they began."""
    found: dict[str, list[Lap]] = defaultdict(list)
    for lap in sorted(laps, key=lambda lap: lap.start_s):
        found[lap.call].append(lap)
    return found


def _by_micro_batch(laps: Iterable[Lap]) -> list[list[Lap]]:
    found: dict[tuple[int, int], list[Lap]] = defaultdict(list)
    for lap in laps:
        found[lap.mini_batch, lap.micro_batch].append(lap)
    return list(found.values())


def imbalance_and_waiting(laps: Sequence[Lap]) -> tuple[float, float] | None:
    """Seconds that the slowest rank of each micro-batch of a call computed, summed, over those of the mean rank; and
    the seconds that the mean rank waited in the call. None where computing cannot be told from waiting."""
    busy_KD = [[lap.busy_s for lap in level if lap.busy_s is not None] for level in _by_micro_batch(laps)]
    ranks, busy_s = len({lap.rank for lap in laps}), sum(map(sum, busy_KD))
    if not busy_s:
        return None
    return sum(map(max, busy_KD)) * ranks / busy_s, (sum(lap.seconds for lap in laps) - busy_s) / ranks


def prediction_error(laps: Sequence[Lap], cost_model: CostModel) -> float:
    """How wrong the costs of a call's micro-batches are, as a share of their seconds.

    sum |cost - seconds| / sum seconds, where costs are scaled to the same sum. Where computing cannot be told from
    waiting, all ranks show the time of the slowest, so a micro-batch of all ranks counts as one, by its costliest rank.
    """
    groups = [[lap] for lap in laps if lap.busy_s is not None]
    groups += _by_micro_batch(lap for lap in laps if lap.busy_s is None)
    cost = np.array([max(lap.cost(cost_model) for lap in group) for group in groups], dtype=np.float64)
    seconds = np.array([max(lap.known_busy_s for lap in group) for group in groups])
    return float(np.abs(cost * (seconds.sum() / cost.sum()) - seconds).sum() / seconds.sum())
