"""What the workers' clocks say of a step, and its metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.job.calls import LOG_PROB, REF
from verl_padding.plan import Job
from verl_padding.plan.cost import CostModel
from verl_padding.record.timings import MicroBatchTiming, prediction_error, timings_by_call
from verl_padding.worker import micro_batch_clock


def read_timings(
    worker_groups: Sequence[Any], job: Job
) -> tuple[list[MicroBatchTiming], dict[str, float]]:
    """Reads the workers' clocks after a local update: its timings and their metrics."""
    answers = [
        each.execute_with_func_generator(micro_batch_clock.read_in_worker) for each in worker_groups
    ]
    timings = [
        timing
        for answer in answers
        for timing in answer.non_tensor_batch[micro_batch_clock.TIMINGS]
    ]
    cost_models = {name: job.cost_model_of(call) for name, call in job.calls()}
    # A LoRA actor is its own reference, by a call that is not planned apart.
    if LOG_PROB in cost_models:
        cost_models.setdefault(REF, cost_models[LOG_PROB])
    return timings, timing_metrics(timings, cost_models)


def timing_metrics(
    timings: Sequence[MicroBatchTiming], cost_models: Mapping[str, CostModel]
) -> dict[str, float]:
    """Metrics of the calls that have timings, by the cost that the plan of each reckoned with."""
    return {
        f"padding/{call}/prediction_error": prediction_error(of_call, cost_models[call])
        for call, of_call in timings_by_call(timings).items()
    }
