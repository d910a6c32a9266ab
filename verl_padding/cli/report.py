"""The command ``verl-padding report``: a run as one HTML file, which needs no network."""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar

from verl_padding.cli.report_steps import DumpedText, read_texts, step_as_json
from verl_padding.errors import PaddingDataError
from verl_padding.job.metric_names import REAL_ROWS_TOTAL, SESSION_SCORE
from verl_padding.plan.row_keys import session_of_key, uid_of_key
from verl_padding.record.step_file import FOLDER, RecordedStep, read_steps
from verl_padding.runs.report import METRICS, ROLLOUTS, dumps_in, known_or_nan, read_metrics, read_step
from verl_padding.version import __version__

SESSION_REWARD = "mean reward of a session"
FIRST_CHARTS = (
    SESSION_REWARD,
    "padding/real_rows/total",
    "padding/pad_rows/total",
    "padding/actor/optimizer_steps/total",
    "actor/grad_norm",
    "timing_s/step",
)
"""Curves that the page shows at first; others can be chosen."""
ROW_TOKENS = ("prompt_length/mean", "response_length/mean")
"""verl's metrics whose sum is the mean of the rows' tokens."""
TOKENS = "tokens of a row"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """A line of the page's table, and the name of what the page unpacks when the line is chosen."""

    name: str
    step: int
    update: int
    rows: int
    sessions: int
    prompts: int
    tokens: int
    trained_tokens: int
    idle_rows: int
    """Rows without a trained token, or with an advantage of exactly 0 on each."""
    reward: float
    """Mean of the sessions; NaN if one of them is not known."""
    is_recorded: bool
    """Whether its rows are, and not its laps alone."""
    packed: str

    @classmethod
    def of(cls, update: RecordedStep, texts: Mapping[str, DumpedText], *, whole_texts: bool) -> Self:
        rewards = _session_rewards(update)
        return cls(
            name=f"step-{update.step}-{update.update}",
            step=update.step,
            update=update.update,
            rows=len(update.keys),
            sessions=len(set(map(session_of_key, update.keys))),
            prompts=len(set(map(uid_of_key, update.keys))),
            tokens=sum(row.tokens for row in update.rows),
            trained_tokens=sum(row.trained_tokens for row in update.rows),
            idle_rows=sum(row.idle for row in update.rows),
            reward=fmean(rewards) if rewards else math.nan,
            is_recorded=bool(update.rows),
            packed=packed(step_as_json(update, texts, whole_texts=whole_texts)),
        )


def _session_rewards(update: RecordedStep) -> list[float]:
    """The reward of each session, NaN where it is not known; every row of a session has it."""
    return [*{session_of_key(row.key): known_or_nan(row.reward) for row in update.rows}.values()]


class _Run:
    """The files of a run, and what is not as it should be.

    Attributes:
        metrics: of each logged step.
        notes: what was left out, and which records are not of this run, a sentence or two each; they are whole once
            the steps have been read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.metrics = dict(read_metrics(folder))
        self.notes: list[str] = []

    def curves(self) -> dict[str, list[tuple[int, float | None]]]:
        """(step, value) of each metric, and of the mean reward of a session; None where it is not known."""
        curves: dict[str, list[tuple[int, float | None]]] = {}
        for step, data in self.metrics.items():
            for name, value in data.items():
                curves.setdefault(name, []).append((step, None if math.isnan(value) else value))
        # As `RunCurves` has them: of steps that are logged, and of dumps where that is stock verl's.
        rewards = dict(curves.get(SESSION_SCORE, ()))
        for path in dumps_in(self._folder / ROLLOUTS):
            step = int(path.stem)
            if step in self.metrics.keys() - rewards.keys() and (rows := self._read(read_step, path)) is not None:
                rewards[step] = None if math.isnan(rows.reward) else rows.reward
        return {SESSION_REWARD: sorted(rewards.items()), **curves} if rewards else curves

    def steps(self, paths: Mapping[int, Path], *, whole_texts: bool) -> Iterator[StepSummary]:
        """The recorded steps, one after the other, as the page is written: memory holds one step."""
        unlogged: list[int] = []
        foreign: list[int] = []
        for step, path in paths.items():
            texts = self._read(read_texts, self._folder / ROLLOUTS / f"{step}.jsonl") or {}
            updates = self._read(read_steps, path) or []
            if self.metrics and step not in self.metrics:
                unlogged.append(step)
            elif any(_differ(update, self.metrics.get(step, {}), texts, len(updates) == 1) for update in updates):
                foreign.append(step)
            for update in updates:
                yield StepSummary.of(update, texts, whole_texts=whole_texts)
        if unlogged:
            self.notes.append(
                f"{METRICS} does not have {_named(unlogged)}: the records are of an earlier job in this folder, or "
                "their job has not logged them yet."
            )
        if foreign:
            self.notes.append(
                f"The records of {_named(foreign)} are not of this run: their rows are not those of {METRICS} or of "
                "the rollout dump."
            )

    def _read(self, read: Callable[[Path], _T], path: Path) -> _T | None:
        try:
            return read(path)
        except PaddingDataError as refusal:
            note = f"Left out: {refusal}"
            self.notes += [note] if note not in self.notes else []
            return None


def _differ(update: RecordedStep, data: Mapping[str, float], texts: Mapping[str, DumpedText], alone: bool) -> bool:
    """Whether the rows of a local update are others than those of its step's metrics, if it is alone in it, or dump."""
    if texts and not texts.keys() & set(update.keys):
        return True
    recorded: dict[str, float] = {REAL_ROWS_TOTAL: len(update.keys)}
    logged = {name: data.get(name, math.nan) for name in (REAL_ROWS_TOTAL, SESSION_SCORE)}
    if update.rows:
        recorded[SESSION_SCORE] = fmean(_session_rewards(update))
        recorded[TOKENS] = fmean(row.tokens for row in update.rows)
        logged[TOKENS] = sum(data.get(name, math.nan) for name in ROW_TOKENS)
    known = [(value, logged[name]) for name, value in recorded.items() if not math.isnan(value + logged[name])]
    return alone and not all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-5) for pair in known)


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def write_report(run: Path, out: Path, *, record: Path | None, steps: str | None, whole_texts: bool) -> Sequence[str]:
    """Writes the report of a run's folder, as the demo and the recipes' run scripts leave it.

    Returns: what was left out of it, and which records are not of this run; the page has it, too.

    Args:
        record: folder of recorded steps; None for the one in the run's folder.
        steps: which recorded steps it has, as ``1,5,10-20``; None for all.
        whole_texts: False to cut texts short.

    Raises:
        PaddingDataError: the folders hold neither metrics nor recorded steps, or the metrics are refused.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise PaddingDataError(
            f"verl-padding report needs {error.name}: pip install 'verl_padding[report]'."
        ) from error
    files_of_run = _Run(run)
    curves = files_of_run.curves()
    record = run / FOLDER if record is None else record
    recorded = {int(path.stem): path for path in dumps_in(record)}
    if not curves and not recorded:
        raise PaddingDataError(
            f"{run}: holds no {METRICS}, and {record} no <step>.jsonl. Name the folder of a job that recorded its "
            "steps with padding.record=true, and that of padding.record_dir with --record."
        )
    chosen = chosen_steps(sorted(recorded), steps)
    environment = Environment(
        loader=PackageLoader("verl_padding.cli", "report_page"), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("page.html")
    assets = files("verl_padding.cli") / "report_page"
    written = out.with_name(f"{out.name}.part")
    try:
        with written.open("wb") as file:
            page.stream(
                run=run.resolve().name,
                version=__version__,
                record=record,
                has_steps=bool(chosen),
                summaries=files_of_run.steps({step: recorded[step] for step in chosen}, whole_texts=whole_texts),
                notes=files_of_run.notes,
                curves=packed({"curves": curves, "first": [name for name in FIRST_CHARTS if name in curves]}),
                plotly=get_plotlyjs(),
                script=(assets / "page.js").read_text(encoding="utf-8"),
                style=(assets / "page.css").read_text(encoding="utf-8"),
            ).dump(file, encoding="utf-8")
        written.replace(out)
    finally:
        written.unlink(missing_ok=True)
    return files_of_run.notes


def packed(data: Any) -> str:
    """JSON, compressed, in letters that HTML takes as they are; the page unpacks it when it is looked at."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def chosen_steps(recorded: Sequence[int], steps: str | None) -> list[int]:
    """The recorded ones of some steps."""
    if steps is None:
        return list(recorded)
    try:
        wanted = set(_numbers(steps))
    except ValueError as error:
        raise PaddingDataError(f"--steps {steps}: not numbers of steps. Write them as 1,5,10-20.") from error
    if not wanted & set(recorded):
        there = f"Choose from {recorded[0]} to {recorded[-1]}" if recorded else "No step is; leave the option out"
        raise PaddingDataError(f"--steps {steps}: none of them is recorded. {there}.")
    return [step for step in recorded if step in wanted]


def _numbers(steps: str) -> Iterator[int]:
    for part in steps.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
