"""What the workers' clocks say of a step: asked for once, logged, learned from."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.job import metric_names as names
from verl_padding.job.calls import LOG_PROB, REF
from verl_padding.plan import Job
from verl_padding.plan.cost import CostModel
from verl_padding.plan.planner import reuses_layout_of
from verl_padding.timing.laps import Lap, imbalance_and_waiting, laps_by_call, measurements, prediction_error
from verl_padding.timing.learned_costs import FILE, LearnedCosts
from verl_padding.worker import micro_batch_clock

logger = logging.getLogger(__name__)


class StepTiming:
    """The laps of each step, by the workers of one job, which have a clock, and what the plan learns from them."""

    def __init__(self, config: DictConfig, padding: PaddingConfig, worker_groups: Sequence[Any]):
        self._trainer = config.trainer
        self._worker_groups = worker_groups
        self._learned = LearnedCosts() if padding.cost_model == "measured" else None
        self._planned: dict[str, CostModel] = {}
        self._formulas: dict[str, CostModel] = {}
        self._cut_by_plan: list[str] = []

    def with_learned_costs(self, job: Job) -> Job:
        """The job of a step, with learned costs for the calls that have better ones than their formula."""
        self._planned = {name: job.cost_model_of(call) for name, call in job.calls()}
        if LOG_PROB in self._planned:  # a LoRA actor is its own reference, by a call that is not planned apart
            self._planned.setdefault(REF, self._planned[LOG_PROB])
        self._formulas = dict(self._planned)
        # A pass that takes over the micro-batches of an update tries what that one tries.
        self._cut_by_plan = [
            name
            for name, call in job.calls()
            if job.packer == "plan" and call.token_budget is not None and reuses_layout_of(job, call) is None
        ]
        if self._learned is not None:
            for name, _ in job.calls():
                self._planned[name] = self._learned.cost_of(name, name in self._cut_by_plan) or self._planned[name]
        return replace(
            job,
            updates={name: replace(call, cost_model=self._planned[name]) for name, call in job.updates.items()},
            inference={name: replace(call, cost_model=self._planned[name]) for name, call in job.inference.items()},
        )

    def read(self) -> tuple[list[Lap], dict[str, float]]:
        """Reads the clocks after a local update, and learns from it; returns the laps and their metrics."""
        answers = [each.execute_with_func_generator(micro_batch_clock.read_in_worker) for each in self._worker_groups]
        laps = [lap for answer in answers for lap in answer.non_tensor_batch[micro_batch_clock.LAPS]]
        if self._learned is not None:
            for change in self._learned.learn(laps, self._formulas, self._cut_by_plan):
                logger.warning("verl_padding: %s", change)
        return laps, timing_metrics(laps, self._planned)

    def save(self, step: int) -> None:
        """Keeps what was learned in the folder of a step's checkpoint."""
        if self._learned is not None:
            self._learned.write(self._checkpoint(step) / FILE)

    def resume(self, step: int) -> None:
        """Takes what was learned from the folder of a step's checkpoint, if the job goes on from one that has some; a
        file that cannot be read is refused, by a PaddingDataError."""
        named = self._trainer.resume_mode == "resume_path"
        path = (Path(self._trainer.resume_from_path) if named else self._checkpoint(step)) / FILE
        if self._learned is not None and step and path.is_file():
            self._learned = LearnedCosts.read(path)

    def _checkpoint(self, step: int) -> Path:
        return Path(self._trainer.default_local_dir) / f"global_step_{step}"


def timing_metrics(laps: Sequence[Lap], cost_models: Mapping[str, CostModel]) -> dict[str, float]:
    """Metrics of the calls that have laps, by the cost that the plan of each reckoned with."""
    metrics: dict[str, float] = {}
    for call, of_call in laps_by_call(laps).items():
        metrics[names.PREDICTION_ERROR.format(call=call)] = prediction_error(measurements(of_call, cost_models[call]))
        if (known := imbalance_and_waiting(of_call)) is not None:
            metrics[names.MEASURED_IMBALANCE.format(call=call)], metrics[names.WAITED_SECONDS.format(call=call)] = known
    return metrics
