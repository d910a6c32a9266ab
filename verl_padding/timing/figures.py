"""What laps say of a plan: how even the ranks were, how long they waited, how right the costs were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from verl_padding.plan.cost import CostModel
from verl_padding.plan.measured_cost import micro_batch_cost
from verl_padding.timing.laps import Lap, by_micro_batch


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


def measured_figures(laps: Sequence[Lap], cost_model: CostModel) -> MeasuredFigures:
    """Figures of the laps of one call.

    Where ranks cannot tell computing from waiting, a micro-batch takes all of them the time of the slowest, and the
    prediction for it is that of the costliest rank.

    Args:
        laps: of one call of one step, at least one.
        cost_model: what the plan reckoned with, for the tokens of each computed row.
    """
    ranks, levels = len({lap.rank for lap in laps}), by_micro_batch(laps)
    cost_LD = [[micro_batch_cost(cost_model, lap.computed_tokens) for lap in level] for level in levels]
    if any(lap.busy_s is None for lap in laps):
        error = prediction_error([max(costs) for costs in cost_LD], [max(lap.seconds for lap in k) for k in levels])
        return MeasuredFigures(micro_imbalance=None, waited_s=None, prediction_error=error)
    busy_LD = [[lap.busy_s or 0.0 for lap in level] for level in levels]
    return MeasuredFigures(
        micro_imbalance=sum(map(max, busy_LD)) * ranks / sum(map(sum, busy_LD)),
        waited_s=sum(max(lap.seconds - (lap.busy_s or 0.0), 0.0) for lap in laps) / ranks,
        prediction_error=prediction_error(list(chain(*cost_LD)), list(chain(*busy_LD))),
    )


def prediction_error(predicted: ArrayLike, seconds: ArrayLike) -> float:
    """sum |predicted - seconds| / sum seconds: predictions are scaled to the same sum, and long ones count more."""
    predicted, seconds = np.asarray(predicted, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    return float(np.abs(predicted * (seconds.sum() / predicted.sum()) - seconds).sum() / seconds.sum())
