"""Metrics of a micro-batch, weighted so that verl's aggregation gives those of the mini-batch's trained rows.

verl appends the metrics of a rank's micro-batches, takes the mean over ranks, then the mean or the sum over
micro-batches, all with equal weights and equal counts. A micro-batch without a trained token has nothing to report, and
one of two rows counts like one of twenty. Here each metric is one running number per rank, so that counts agree,
and is already weighted, so that a plain mean over the reporting ranks gives the mini-batch's value.
"""

from __future__ import annotations

import re
from typing import Any

from verl.utils.metric import AggregationType, Metric


class RunningMetric(Metric):
    """A metric that keeps one number for a rank's micro-batches so far: their sum, minimum or maximum."""

    values: list[float]

    def append(self, value: Any) -> None:
        super().append(value)
        if len(self.values) > 1:
            self.values = [self._aggregate(self.values, self.aggregation)]

    def init_list(self) -> RunningMetric:
        return RunningMetric(aggregation=self.aggregation)


# Only its name says what a metric of verl is: an extreme, as in reduce_metrics, or a mean over rows, as the metrics of
# a rollout correction that are perplexities or of sequences. All other means are over tokens. The option of a
# rejection, as in rollout_rs_seq_max_k2_mean, says nothing about that, except in the fractions of rejected rows.
_OPTION = re.compile(r"(rollout_rs)_(token|seq)(?:_sum|_mean|_max)?_k[123](_.*)")
_EXTREME = re.compile(r"(?:^|[_/])(min|max)(?:_deviation)?$|/(min|max)_")
_OF_ROWS = re.compile(r"(?:^|[_/])(?:ppl|seq)(?:$|_)")


def _kind_of_mean(name: str) -> str:
    """``min`` or ``max`` for an extreme, else what the mean is over: ``rows`` or ``tokens``."""
    option = _OPTION.search(name)
    if option is not None:
        if option[2] == "seq" and option[3].startswith("_fraction"):
            return "rows"
        name = option[1] + option[3]
    extreme = _EXTREME.search(name)
    if extreme is not None:
        return extreme[1] or extreme[2]
    return "rows" if _OF_ROWS.search(name) else "tokens"


def share_metrics(
    metrics: dict[str, Any], *, of_tokens: float, of_rows: float, reporting_ranks: int, dp_size: int
) -> dict[str, Any]:
    """Metrics of a loss on one micro-batch, as its share of the mini-batch's metrics.

    Sums (losses, which verl scales by the data-parallel size) stay sums; means become weighted sums, of tokens or, by
    their name, of rows; extremes stay extremes. What cannot be added up (a standard deviation) becomes the mean of the
    micro-batches', as in verl.

    Args:
        of_tokens: the micro-batch's part of the mini-batch's trained tokens.
        of_rows: its part of the rows with a trained token.
        reporting_ranks: ranks that hold a trained token of the mini-batch: the others report no metric.
    """
    shared = {}
    for name, value in metrics.items():
        aggregation = value.aggregation if isinstance(value, Metric) else AggregationType.MEAN
        number = float(value.aggregate() if isinstance(value, Metric) else value)
        if aggregation is AggregationType.MEAN:
            kind = _kind_of_mean(name)
            if kind in ("min", "max"):
                aggregation = AggregationType(kind)
            else:
                aggregation = AggregationType.SUM
                number *= (of_rows if kind == "rows" else of_tokens) * reporting_ranks
        elif aggregation is AggregationType.SUM:
            # verl takes the mean of the ranks' sums. Absent ranks would add a zero to that mean.
            number *= reporting_ranks / dp_size
        shared[name] = RunningMetric(aggregation, number)
    return shared


def names_of_sums(metrics: dict[str, Any]) -> list[str]:
    """Names of those metrics of a loss that verl adds up over micro-batches, as it does losses."""
    return [name for name, value in metrics.items() if getattr(value, "aggregation", None) is AggregationType.SUM]
