"""Writes the file of each step: what its rows were worth, and where each went."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from verl_padding.driver.planned_update import PlannedUpdate
from verl_padding.driver.step_metrics import TrainedRows
from verl_padding.job.calls import ACTOR
from verl_padding.job.verl_job import VerlJob
from verl_padding.plan.layout import Layout
from verl_padding.record.step_file import FOLDER, Place, RecordedRow, RecordedStep, write_steps

logger = logging.getLogger(__name__)


def write_record(
    job: VerlJob, step: int, updates: Sequence[PlannedUpdate], rows_of: Sequence[TrainedRows]
) -> None:
    """Writes the file of a global step with the rows of each local update, if asked for. Where it
    cannot be written, the log has a warning."""
    if not job.padding.record:
        return
    trainer = job.config.trainer
    rollouts = trainer.get("rollout_data_dir")
    beside = Path(rollouts).expanduser().parent if rollouts else Path(trainer.default_local_dir)
    path = beside / FOLDER / f"{step}.jsonl"
    recorded = [
        RecordedStep(
            step=step,
            update=number,
            keys=tuple(update.batch.keys),
            rows=list(recorded_rows(step, update, rows)),
        )
        for number, (update, rows) in enumerate(zip(updates, rows_of, strict=True))
    ]
    try:
        write_steps(recorded, path)
    except OSError as error:  # a full disk, perhaps: no reason to lose a step
        logger.warning(
            "verl_padding: %s cannot be written (%s); the job continues without it", path, error
        )


def recorded_rows(step: int, update: PlannedUpdate, rows: TrainedRows) -> Iterator[RecordedRow]:
    """The rows of a local update of a global step, in the order of its batch."""
    place_of = {call: places(layout) for call, layout in update.plan.layouts.items()}
    tries, weight_R = update.prefixes.by_tokens, update.weights(ACTOR)
    # In depth-first order a row shares with the one before it.
    order = np.argsort(tries.dfs_position_R)
    for row, key in enumerate(rows.keys):
        shared, made_by = int(tries.shared_R[row]), rows.weights_step_R[row]
        trained = int(rows.trained_R[row])
        yield RecordedRow(
            row=row,
            key=key,
            tokens=int(rows.tokens_R[row]),
            trained_tokens=trained,
            reward=float(rows.reward_R[row]),
            advantage=float(rows.advantage_R[row]) if trained else None,
            zero_advantage=not rows.has_advantage_R[row],
            weight=weight_R[row],
            shared_tokens=shared,
            shares_with=int(order[tries.dfs_position_R[row] - 1]) if shared else None,
            staleness=None if made_by is None else step - 1 - made_by,
            places={call: by_row[row] for call, by_row in place_of.items() if row in by_row},
        )


def places(layout: Layout) -> dict[int, Place]:
    """Where a layout puts each real row, unless it leaves it out."""
    return {
        row: Place(mini_batch, rank, micro_batch if layout.cut_by != "verl" else None)
        for mini_batch, ranks in enumerate(layout.rows_MDK)
        for rank, parts in enumerate(ranks)
        for micro_batch, part in enumerate(parts)
        for row in part
        if row < layout.n_rows
    }
