"""Laps: what each micro-batch took on each rank, and their figures."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.cost import CostModel
from verl_padding.plan.measured_cost import Measurement, micro_batch_cost

Measured = tuple[Measurement, float]
"""A micro-batch that was measured, and its cost by a model: that of its costliest rank."""


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


def measurements(laps: Sequence[Lap], cost_model: CostModel) -> list[Measured]:
    """Each lap by itself, or where waiting cannot be told apart, those of a micro-batch on all ranks as one."""
    groups = [[lap] for lap in laps if lap.busy_s is not None]
    groups += _by_micro_batch(lap for lap in laps if lap.busy_s is None)
    found = []
    for group in groups:
        held_D = [(lap.computed_tokens, lap.shared_tokens) for lap in sorted(group, key=lambda lap: lap.rank)]
        cost = max(micro_batch_cost(cost_model, *held) for held in held_D)
        found.append((Measurement.of(max(lap.known_busy_s for lap in group), *zip(*held_D, strict=True)), float(cost)))
    return found


def imbalance_and_waiting(laps: Sequence[Lap]) -> tuple[float, float] | None:
    """Seconds that the slowest rank of each micro-batch of a call computed, summed, over those of the mean rank; and
    the seconds that the mean rank waited in the call. None where computing cannot be told from waiting."""
    busy_KD = [[lap.busy_s for lap in level if lap.busy_s is not None] for level in _by_micro_batch(laps)]
    ranks, busy_s = len({lap.rank for lap in laps}), sum(map(sum, busy_KD))
    if not busy_s:
        return None
    return sum(map(max, busy_KD)) * ranks / busy_s, (sum(lap.seconds for lap in laps) - busy_s) / ranks


def prediction_error(predicted: Sequence[Measured]) -> float:
    """sum |cost - seconds| / sum seconds: costs are scaled to the same sum, and long micro-batches count more."""
    cost = np.array([cost for _, cost in predicted])
    seconds = np.array([measured.seconds for measured, _ in predicted])
    return float(np.abs(cost * (seconds.sum() / cost.sum()) - seconds).sum() / seconds.sum())
