"""Writes the file of each step: what its rows were worth, where each went, and what the workers'
clocks say."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.plan import BatchPlan
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import micro_batches_of
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.record.step_file import (
    FOLDER,
    Place,
    RecordedRow,
    RecordedStep,
    write_savings,
    write_steps,
)
from verl_padding.timing.timings import MicroBatchTiming

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LocalUpdate:
    """A local update that has been made."""

    batch: KVBatchMeta
    """The real rows, as they were planned."""
    plan: BatchPlan
    """As it was carried out."""
    mask_R: Sequence[torch.Tensor] = field(repr=False)
    """Which response tokens of each row were trained, (response,) each."""
    weight_R: Sequence[float]
    """What the gradient of each row's outputs was multiplied by in the actor's update."""
    prefixes: PrefixDetection = field(repr=False)
    """How far the rows begin alike."""
    pad_tags: Sequence[Mapping[str, int]] = ()
    """Tags of the pads that were put."""
    timings: Sequence[MicroBatchTiming] = ()
    """Empty where micro-batches are not timed."""


class StepRecord:
    """The files of a job's steps; each has what the settings ask for, rows or timings or both."""

    def __init__(self, config: DictConfig, padding: PaddingConfig):
        rollouts = config.trainer.get("rollout_data_dir")
        beside = (
            Path(rollouts).expanduser().parent
            if rollouts
            else Path(config.trainer.default_local_dir)
        )
        self._folder = beside / FOLDER
        self._has_rows, self._has_timings = padding.record, padding.timing

    def write(
        self,
        step: int,
        updates: Sequence[LocalUpdate],
        rows_of: Sequence[TrainedRows],
        savings: Sequence[str],
    ) -> None:
        """Writes the local updates of a global step, the rows of each, and beside them lines that
        say which savings the job has; where that fails, the log has a warning."""
        if not (self._has_rows or self._has_timings):
            return
        path = self._folder / f"{step}.jsonl"
        recorded = [
            RecordedStep(
                step=step,
                update=number,
                keys=update.batch.keys,
                rows=list(recorded_rows(step, update, rows)) if self._has_rows else [],
                timings=list(update.timings) if self._has_timings else [],
            )
            for number, (update, rows) in enumerate(zip(updates, rows_of, strict=True))
        ]
        try:
            write_steps(recorded, path)
            write_savings(self._folder, savings)
        except OSError as error:  # a full disk, perhaps: no reason to lose a step
            logger.warning(
                "verl_padding: %s cannot be written (%s); the job goes on without it", path, error
            )


def recorded_rows(step: int, update: LocalUpdate, rows: TrainedRows) -> Iterator[RecordedRow]:
    """The rows of a local update of a global step, in the order of its batch."""
    place_of = {call: places(layout) for call, layout in update.plan.layouts.items()}
    forest = update.prefixes.by_tokens
    # In depth-first order a row shares with the one before it.
    order = np.argsort(forest.dfs_position_R)
    for row, key in enumerate(rows.keys):
        shared, trained, made_by = (
            int(forest.shared_R[row]),
            int(rows.trained_R[row]),
            rows.weights_step_R[row],
        )
        yield RecordedRow(
            row=row,
            key=key,
            tokens=int(rows.tokens_R[row]),
            trained_tokens=trained,
            reward=float(rows.reward_R[row]),
            advantage=float(rows.advantage_R[row]) if trained else None,
            idle=not rows.has_advantage_R[row],
            weight=update.weight_R[row],
            shared_tokens=shared,
            shares_with=int(order[forest.dfs_position_R[row] - 1]) if shared else None,
            age=None if made_by is None else step - 1 - made_by,
            places={call: of_call[row] for call, of_call in place_of.items() if row in of_call},
        )


def places(layout: Layout) -> dict[int, Place]:
    """Where a layout puts each real row, unless it leaves it out."""
    is_cut = layout.micro_batch_rows is not None
    return {
        row: Place(mini_batch, rank, micro_batch if is_cut else None)
        for mini_batch, ranks in enumerate(micro_batches_of(layout))
        for rank, parts in enumerate(ranks)
        for micro_batch, part in enumerate(parts)
        for row in part
        if row < layout.n_rows
    }
