"""What laps say of a plan: how even the ranks were, how long they waited, how right the costs were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from verl_padding.plan.cost import CostModel
from verl_padding.plan.measured_cost import Measurement, micro_batch_cost
from verl_padding.timing.laps import Lap, by_micro_batch

Measured = tuple[Measurement, float]
"""A micro-batch that was measured, and its cost by a model: that of its costliest rank."""


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures:
    """Figures of the laps of one call."""

    micro_imbalance: float | None
    """Seconds that the slowest rank of each micro-batch computed, summed, over those of the mean rank; None where
    computing cannot be told from waiting."""
    waited_s: float | None
    """Seconds that a rank waited inside of the call, the mean over ranks; None likewise."""
    prediction_error: float
    """Of the seconds of micro-batches by their costs, see :func:`prediction_error`."""


def measurements(laps: Sequence[Lap], cost_model: CostModel) -> list[Measured]:
    """Each lap by itself, or where waiting cannot be told apart, those of a micro-batch on all ranks as one."""
    groups = [[lap] for lap in laps if lap.busy_s is not None]
    groups += by_micro_batch(lap for lap in laps if lap.busy_s is None)
    found = []
    for group in groups:
        seconds = max(lap.seconds if lap.busy_s is None else lap.busy_s for lap in group)
        tokens_D = [lap.computed_tokens for lap in sorted(group, key=lambda lap: lap.rank)]
        cost = max(micro_batch_cost(cost_model, tokens) for tokens in tokens_D)
        found.append((Measurement.of(seconds, tokens_D), float(cost)))
    return found


def measured_figures(laps: Sequence[Lap], cost_model: CostModel) -> MeasuredFigures:
    """Figures of the laps of one call of one step, at least one; ``cost_model`` is what the plan reckoned with."""
    measured = measurements(laps, cost_model)
    error = prediction_error([cost for _, cost in measured], [each.seconds for each, _ in measured])
    busy_KD = [[lap.busy_s for lap in level if lap.busy_s is not None] for level in by_micro_batch(laps)]
    ranks, busy_s = len({lap.rank for lap in laps}), sum(map(sum, busy_KD))
    if not busy_s:
        return MeasuredFigures(micro_imbalance=None, waited_s=None, prediction_error=error)
    return MeasuredFigures(
        micro_imbalance=sum(map(max, busy_KD)) * ranks / busy_s,
        waited_s=(sum(lap.seconds for lap in laps) - busy_s) / ranks,
        prediction_error=error,
    )


def prediction_error(predicted: ArrayLike, seconds: ArrayLike) -> float:
    """sum |predicted - seconds| / sum seconds: predictions are scaled to the same sum, and long ones count more."""
    predicted, seconds = np.asarray(predicted, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    return float(np.abs(predicted * (seconds.sum() / predicted.sum()) - seconds).sum() / seconds.sum())
