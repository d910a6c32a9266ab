"""What the workers' clocks say of a step, and its metrics."""

from collections.abc import Sequence
from typing import Any

from verl_padding.plan.cost import CostModel
from verl_padding.record.timings import MicroBatchTiming, prediction_error, timings_by_call
from verl_padding.worker import micro_batch_clock


def read_timings(worker_groups: Sequence[Any]) -> list[MicroBatchTiming]:
    """Reads the workers' clocks after a local update."""
    answers = [
        each.execute_with_func_generator(micro_batch_clock.read_in_worker) for each in worker_groups
    ]
    return [
        timing
        for answer in answers
        for timing in answer.non_tensor_batch[micro_batch_clock.TIMINGS]
    ]


def timing_metrics(timings: Sequence[MicroBatchTiming], row_cost: CostModel) -> dict[str, float]:
    """Metrics of the calls that have timings, by the cost that their plan reckoned with."""
    return {
        f"padding/{call}/prediction_error": prediction_error(call_timings, row_cost)
        for call, call_timings in timings_by_call(timings).items()
    }
