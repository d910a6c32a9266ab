"""What the workers' clocks say of a step: asked for once, logged, and written to the step's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.patches import micro_batch_clock
from verl_padding.plan.cost import CostModel
from verl_padding.timing.figures import measured_figures
from verl_padding.timing.laps import SUFFIX, TimedStep, write_step
from verl_padding.verl_job.metric_names import MEASURED_IMBALANCE, PREDICTION_ERROR, WAITED_SECONDS

FOLDER = "timing"


class StepTiming:
    """The laps of each step, by the workers of one job.

    Args:
        folder: where the steps' files go.
        worker_groups: verl's, each once; their workers have a clock.
    """

    def __init__(self, folder: Path, worker_groups: Sequence[Any]):
        self._folder = folder
        self._worker_groups = worker_groups
        self._updates: list[TimedStep] = []

    @classmethod
    def install(cls, folder: Path, worker_groups: Sequence[Any]) -> StepTiming:
        """Gives each worker its clock."""
        for worker_group in worker_groups:
            worker_group.execute_with_func_generator(micro_batch_clock.install_in_worker)
        return cls(folder, worker_groups)

    def read(self, step: int, keys: Sequence[str], cost_models: Mapping[str, CostModel]) -> dict[str, float]:
        """Reads the clocks after a local update; returns its metrics.

        Args:
            step: the global step; its file has all of its local updates.
            keys: key of each row of the batch.
            cost_models: of each call, what the plan reckoned with.
        """
        laps = [lap for worker_group in self._worker_groups for lap in _ask(worker_group)]
        if self._updates and self._updates[0].step != step:
            self._updates = []
        timed = TimedStep(step=step, keys=list(keys), laps=laps)
        self._updates.append(timed)
        write_step(self._updates, self._folder / f"{step}{SUFFIX}")
        return timing_metrics(timed, cost_models)


def timing_metrics(timed: TimedStep, cost_models: Mapping[str, CostModel]) -> dict[str, float]:
    """Metrics of the calls that have laps; ``cost_models``: of each call, what the plan reckoned with."""
    metrics: dict[str, float] = {}
    for call in timed.calls:
        figures = measured_figures(timed.of_call(call), cost_models[call])
        metrics[PREDICTION_ERROR.format(call=call)] = figures.prediction_error
        if figures.micro_imbalance is not None and figures.waited_s is not None:
            metrics[MEASURED_IMBALANCE.format(call=call)] = figures.micro_imbalance
            metrics[WAITED_SECONDS.format(call=call)] = figures.waited_s
    return metrics


def _ask(worker_group: Any) -> Iterable[Any]:
    answer = worker_group.execute_with_func_generator(micro_batch_clock.read_in_worker)
    laps: Iterable[Any] = answer.non_tensor_batch[micro_batch_clock.LAPS]
    return laps


def timing_folder(config: DictConfig, padding: PaddingConfig) -> Path:
    """Where the files of a job's steps go."""
    if padding.timing_dir is not None:
        return Path(padding.timing_dir).expanduser()
    rollouts = config.trainer.get("rollout_data_dir")
    return Path(rollouts).expanduser().parent / FOLDER if rollouts else Path(config.trainer.default_local_dir) / FOLDER
