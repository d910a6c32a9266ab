"""What verl has written of a run: metrics and rollout dumps, step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_padding.job.metric_names import ROW_REWARD
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.row_keys import session_of_key

METRICS = "metrics.jsonl"
"""Written by verl's ``file`` logger: one line ``{"step": ..., "data": {metric: value}}`` per step."""
ROLLOUTS = "rollouts"
"""verl's ``trainer.rollout_data_dir``: ``<step>.jsonl`` with one line per row, whose ``uid`` is the row's key."""
LOG = "log"
"""The output of the job."""


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows of one global step, as the rollout dump has them."""

    step: int
    reward: float
    """Mean reward of the sessions. verl's ``critic/score/mean`` is over rows, so long sessions count more often."""
    real: int
    dumped_pads: int
    """Pads among the dumped rows: none if only worker calls see pads."""


def read_metrics(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, metrics) of the training steps that the job in ``folder`` has logged so far."""
    path = folder / METRICS
    entries = _objects(path) if path.exists() else []
    return [(entry["step"], entry["data"]) for entry in entries if ROW_REWARD in entry["data"]]


def read_rows(folder: Path) -> list[StepRows]:
    """Rows of each step, from the rollout dumps of a job that has ended."""
    return [read_step(path) for path in dumps_in(folder / ROLLOUTS)]


def dumps_in(folder: Path) -> list[Path]:
    """The rollout dumps in a folder, ``<step>.jsonl``, in the order of their steps; none if there is no such folder."""
    dumps = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return sorted(dumps, key=lambda path: int(path.stem))


def read_step(path: Path) -> StepRows:
    """Rows of the step that a rollout dump holds."""
    rows = _objects(path)
    real = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]
    # verl gives every row of a session the session's reward.
    rewards = {session_of_key(row["uid"]): row["score"] for row in real}
    return StepRows(
        step=int(path.stem), reward=fmean(rewards.values()), real=len(real), dumped_pads=len(rows) - len(real)
    )


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line, without a last line that is half written."""
    # Not splitlines: a reply may hold a line separator that JSON leaves as it is, such as U+2028.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
