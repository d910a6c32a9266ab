"""What a run has left: metrics and rollout dumps as verl has written them, and whether its agent has learned."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.job.metric_names import REAL_ROWS_TOTAL, ROW_REWARD, SESSION_SCORE
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.counted import counted
from verl_padding.plan.row_keys import session_of_key

METRICS = "metrics.jsonl"  # of verl's `file` logger: one line {"step": ..., "data": {metric: value}} per step
ROLLOUTS = "rollouts"  # verl's trainer.rollout_data_dir: <step>.jsonl, one line per row, whose uid is the row's key
LOG = "log"  # the output of the job
LAST = 10  # steps at the end of a run that count as its result


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows of one global step, as the rollout dump or the metrics have them."""

    step: int
    reward: float
    """Mean reward of the sessions; NaN if one of them is not known. verl's ``critic/score/mean`` is over rows, so long
    sessions count more often."""
    real: int
    dumped_pads: int


def read_metrics(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of the training steps that the job in ``folder`` has logged so far.

    A metric that is NaN, infinite or null, as verl's logger writes these, is NaN: not known, but not absent. What is
    neither a number nor null is left out.

    Raises:
        PaddingDataError: a line is not one of verl's file logger.
    """
    path = folder / METRICS
    try:
        logged = [(int(entry["step"]), dict(entry["data"])) for entry in _objects(path)] if path.exists() else []
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PaddingDataError(f"{path}: not metrics of verl's file logger ({error!r}). Move it elsewhere.") from error
    return [
        (step, {name: known_or_nan(value) for name, value in data.items() if isinstance(value, int | float | None)})
        for step, data in logged
        if ROW_REWARD in data
    ]


def known_or_nan(value: float | None) -> float:
    """The number, or NaN for whatever says that it is not known: null, NaN, and infinity.

    >>> known_or_nan(0.5), known_or_nan(None), known_or_nan(-math.inf)
    (0.5, nan, nan)
    """
    return value if value is not None and math.isfinite(value) else math.nan


def dumps_in(folder: Path) -> list[Path]:
    """The rollout dumps in a folder, ``<step>.jsonl``, in the order of their steps; none if there is no such folder."""
    dumps = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return sorted(dumps, key=lambda path: int(path.stem))


def logged_rows(step: int, data: Mapping[str, float]) -> StepRows | None:
    """Rows of a step by its metrics; None where these do not say, as stock verl's."""
    if SESSION_SCORE not in data or math.isnan(data.get(REAL_ROWS_TOTAL, math.nan)):
        return None
    return StepRows(step=step, reward=data[SESSION_SCORE], real=int(data[REAL_ROWS_TOTAL]), dumped_pads=0)


def read_step(path: Path) -> StepRows:
    """Rows of the step that a rollout dump holds; a PaddingDataError if it is torn, none of verl's, or pads alone."""
    rows = read_dump(path, uid=str, score=int | float | None)
    real = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]
    if not real:
        raise PaddingDataError(f"{path}: holds no row of a session. Move it elsewhere.")
    # verl gives every row of a session the session's reward.
    rewards = {session_of_key(row["uid"]): known_or_nan(row["score"]) for row in real}
    pads = len(rows) - len(real)
    return StepRows(step=int(path.stem), reward=fmean(rewards.values()), real=len(real), dumped_pads=pads)


def read_dump(path: Path, **fields: Any) -> list[dict[str, Any]]:
    """Fields of the rows of a rollout dump, by their names and types.

    Raises:
        PaddingDataError: a line does not have them, or the file does not end with a line's end: verl writes dumps in a
            thread, so that a job that is running, or was killed, may leave a part of one.
    """
    if not path.read_bytes().endswith(b"\n"):
        raise PaddingDataError(f"{path}: is not whole. Wait until its job has written it, or remove it.")
    try:
        rows = _objects(path)
        for row in rows:
            for name, kind in fields.items():
                if not isinstance(row[name], kind):
                    raise TypeError(f"{name}={row[name]!r}")
        return [{name: row[name] for name in fields} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise PaddingDataError(f"{path}: not a rollout dump of verl ({error!r}). Move it elsewhere.") from error


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line, without a last line that is half written."""
    # Not splitlines: a reply may hold a line separator that JSON leaves as it is, such as U+2028.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a recipe is known to reach."""

    reward: float  # of a session: the mean over the last steps has to reach it
    floor: float  # no step may fall below it once a step has reached `reward`
    steps: int  # that the recipe is made for; a shorter run need not have learned


class Learning:
    """The mean reward of a session at each step of a run (one at least), against its recipe's goal.

    Attributes:
        first, last: at the first step, and the mean over the last `LAST` steps.
        reached: the first step, counted from 1, that reaches the goal; None for none.
        lowest: the lowest reward of a step from there on.
        learned: whether the goal was reached and held; None if it was not, but the run was too short, or if the reward
            of a step is not known (NaN).
    """

    def __init__(self, rewards: Sequence[float], goal: Goal):
        self._steps, self._goal = len(rewards), goal
        self.first, self.last = rewards[0], fmean(rewards[-LAST:])
        self.reached = next((step for step, reward in enumerate(rewards, start=1) if reward >= goal.reward), None)
        self.lowest = None if self.reached is None else min(rewards[self.reached - 1 :])
        held = self.last >= goal.reward and self.lowest is not None and self.lowest >= goal.floor
        self._unknown = sum(map(math.isnan, rewards))
        self.learned: bool | None = held or (None if len(rewards) < goal.steps else False)
        if self._unknown:
            self.learned = None

    def __str__(self) -> str:
        goal, steps = self._goal, self._steps
        if self._unknown:
            return (
                f"Whether the agent has learned its task is unknown: so are the rewards of {self._unknown} of "
                f"{counted(steps, 'step')}."
            )
        verdict = {
            True: "The agent has learned its task",
            False: "The agent has not learned its task",
            None: f"{counted(steps, 'step')} cannot show whether the agent learns; the recipe is made for {goal.steps}",
        }[self.learned]
        then = "no step reached it"
        if self.reached is not None:
            then = f"step {self.reached} was the first to reach it, the lowest reward since then is {self.lowest:.3f}"
        return (
            f"{verdict}: the mean reward of a session is {self.last:.3f} over the last {min(LAST, steps)} steps, after "
            f"{self.first:.3f} at the first step. The goal is {goal.reward}, and never below {goal.floor} after that; "
            f"{then}."
        )
