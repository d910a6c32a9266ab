"""The files of a run: metrics and rollout dumps as verl has written them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.row_keys import session_of_key
from verl_padding.record.files import Count, read_lines, read_objects

ROW_REWARD = "critic/score/mean"
"""A metric of each training step."""
METRICS = "metrics.jsonl"
"""Of verl's ``file`` logger: a line ``{"step": .., "data": {metric: value}}`` for each step."""
ROLLOUTS = "rollouts"
"""verl's ``trainer.rollout_data_dir``: ``<step>.jsonl``, a line for each row, whose uid is the
row's key."""
LOG = "log"
"""The output of the job."""
CONFIG = Path("hydra", ".hydra", "config.yaml")
"""The job's config, where ``hydra.run.dir`` is the folder ``hydra`` of the run."""


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Counts of a step's rollout dump."""

    step: int
    reward: float
    """Mean reward of the sessions, NaN if one of them is unknown. verl's ``critic/score/mean`` is
    the mean over rows, where long sessions count more often."""
    real: int
    dumped_pads: int


def read_metrics(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of the training steps that the job in ``folder`` has logged so far.

    A metric that is NaN, infinite or null is NaN. What is no number, or no training step, is left
    out.

    Raises:
        PaddingDataError: the file is none of verl's file logger.
    """
    path = folder / METRICS
    step_number = TypeAdapter(Count)

    def parse(entry: dict[str, Any]) -> tuple[int, dict[str, float]]:
        numbers = {
            name: known_or_nan(value)
            for name, value in dict(entry["data"]).items()
            if isinstance(value, int | float | None)
        }
        return step_number.validate_python(entry["step"]), numbers

    # The last line may be half written.
    lines = (line for line in read_lines(path) if line.endswith(b"\n")) if path.exists() else ()
    what, fix = "metrics of verl's file logger", "Move it elsewhere"
    logged = list(read_objects(lines, str(path), what, fix, parse))
    return [(step, data) for step, data in logged if ROW_REWARD in data]


def known_or_nan(value: float | None) -> float:
    """The number, or NaN for null, NaN and infinity.

    >>> known_or_nan(0.5), known_or_nan(None), known_or_nan(-math.inf)
    (0.5, nan, nan)
    """
    return value if value is not None and math.isfinite(value) else math.nan


def dumps_in(folder: Path) -> list[Path]:
    """The files ``<step>.jsonl`` in a folder, in the order of their steps."""
    dumps = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return sorted(dumps, key=lambda path: int(path.stem))


def read_step(path: Path) -> StepRows:
    """Counts of a rollout dump; a PaddingDataError if it is torn, none of verl's, or pads alone."""
    rows = read_dump(path, uid=str, score=int | float | None)
    real = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]
    if not real:
        raise PaddingDataError(f"{path}: holds no row of a session. Move it elsewhere.")
    # verl gives every row of a session the session's reward.
    rewards = {session_of_key(row["uid"]): known_or_nan(row["score"]) for row in real}
    pads = len(rows) - len(real)
    return StepRows(
        step=int(path.stem), reward=fmean(rewards.values()), real=len(real), dumped_pads=pads
    )


def read_dump(path: Path, **fields: Any) -> list[dict[str, Any]]:
    """The rows of a rollout dump, which have these fields, of these types.

    Raises:
        PaddingDataError: a line lacks one of them, or the last line has no end. verl writes dumps
            in a thread: a job that is running, or was killed, may leave a part of one.
    """

    def check(row: dict[str, Any]) -> dict[str, Any]:
        for name, kind in fields.items():
            if not isinstance(row[name], kind):
                raise TypeError(f"{name}={row[name]!r}")
        return row

    what, fix = "a rollout dump of verl", "Move it elsewhere"
    return list(read_objects(_whole_lines(path), str(path), what, fix, check))


def _whole_lines(path: Path) -> Iterator[bytes]:
    for line in read_lines(path):
        # A line without its end may still be whole JSON, such as a number that is cut off.
        if not line.endswith(b"\n"):
            fix = "Wait until its job has written it, or remove it"
            raise PaddingDataError(f"{path}: is not whole. {fix}.")
        yield line
