"""What the workers' clocks say of a step, and its metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.job import metric_names as names
from verl_padding.job.calls import LOG_PROB, REF
from verl_padding.plan import Job
from verl_padding.plan.cost import CostModel
from verl_padding.timing.laps import Lap, imbalance_and_waiting, laps_by_call, prediction_error
from verl_padding.worker import micro_batch_clock


class StepTiming:
    """The laps of each local update, by the workers of one job, which have a clock."""

    def __init__(self, worker_groups: Sequence[Any]):
        self._worker_groups = worker_groups
        self._cost_models: dict[str, CostModel] = {}

    def start_update(self, job: Job) -> None:
        """Notes what the plan of each call reckons with."""
        self._cost_models = {name: job.cost_model_of(call) for name, call in job.calls()}
        if LOG_PROB in self._cost_models:  # a LoRA actor is its own reference, by a call that is not planned apart
            self._cost_models.setdefault(REF, self._cost_models[LOG_PROB])

    def read(self) -> tuple[list[Lap], dict[str, float]]:
        """Reads the clocks after a local update: its laps and their metrics."""
        answers = [each.execute_with_func_generator(micro_batch_clock.read_in_worker) for each in self._worker_groups]
        laps = [lap for answer in answers for lap in answer.non_tensor_batch[micro_batch_clock.LAPS]]
        return laps, timing_metrics(laps, self._cost_models)


def timing_metrics(laps: Sequence[Lap], cost_models: Mapping[str, CostModel]) -> dict[str, float]:
    """Metrics of the calls that have laps, by the cost that the plan of each reckoned with."""
    metrics: dict[str, float] = {}
    for call, of_call in laps_by_call(laps).items():
        metrics[names.PREDICTION_ERROR.format(call=call)] = prediction_error(of_call, cost_models[call])
        if (known := imbalance_and_waiting(of_call)) is not None:
            metrics[names.MEASURED_IMBALANCE.format(call=call)], metrics[names.WAITED_SECONDS.format(call=call)] = known
    return metrics
