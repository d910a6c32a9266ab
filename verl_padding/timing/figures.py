"""What laps say of a plan: how even the ranks were, how long they waited, how right the costs were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.cost import CostModel
from verl_padding.plan.measured_cost import micro_batch_cost
from verl_padding.timing.laps import Lap


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures:
    """Figures of the laps of one call."""

    micro_imbalance: float | None
    """Seconds that the slowest rank of each micro-batch computed, summed, over those of the mean rank; None where
    computing cannot be told from waiting."""

    waited_s: float | None
    """Seconds that a rank waited inside of the call, the mean over ranks; None likewise."""

    prediction_error: float
    """Difference of a micro-batch's predicted and measured seconds over the measured ones, as a mean that counts long
    micro-batches more: sum |predicted - measured| / sum measured. Costs are scaled to the same sum."""


def measured_figures(laps: Sequence[Lap], cost_model: CostModel) -> MeasuredFigures:
    """Figures of the laps of one call.

    Where ranks cannot tell computing from waiting, a micro-batch takes all of them the time of the slowest, and the
    prediction for it is that of the costliest rank.

    Args:
        laps: of one call of one step, at least one.
        cost_model: what the plan reckoned with, for the tokens of each computed row.
    """
    by_level: dict[tuple[int, int], list[Lap]] = defaultdict(list)
    for lap in laps:
        by_level[lap.mini_batch, lap.micro_batch].append(lap)
    ranks = len({lap.rank for lap in laps})
    busy = [lap.busy_s for lap in laps if lap.busy_s is not None]
    told_apart = len(busy) == len(laps)
    if told_apart:
        measured = np.array(busy)
        predicted = np.array([_cost(lap, cost_model) for lap in laps], dtype=np.float64)
    else:
        measured = np.array([max(lap.seconds for lap in level) for level in by_level.values()])
        predicted = np.array([max(_cost(lap, cost_model) for lap in level) for level in by_level.values()], np.float64)
    scaled = predicted * (measured.sum() / predicted.sum())
    error = float(np.abs(scaled - measured).sum() / measured.sum())
    if not told_apart:
        return MeasuredFigures(micro_imbalance=None, waited_s=None, prediction_error=error)
    slowest = sum(max(lap.busy_s or 0.0 for lap in level) for level in by_level.values())
    return MeasuredFigures(
        micro_imbalance=slowest * ranks / float(measured.sum()),
        waited_s=sum(max(lap.seconds - (lap.busy_s or 0.0), 0.0) for lap in laps) / ranks,
        prediction_error=error,
    )


def _cost(lap: Lap, cost_model: CostModel) -> int:
    return micro_batch_cost(cost_model, lap.computed_tokens)
