"""The command ``verl-padding report``: a run as one HTML file, which needs no network."""

import base64
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from verl_padding.cli.report_steps import DumpedText, read_texts, step_as_json
from verl_padding.errors import PaddingDataError
from verl_padding.plan.row_keys import session_of_key, uid_of_key
from verl_padding.record.step_file import FOLDER, RecordedStep, read_steps
from verl_padding.runs.report import METRICS, ROLLOUTS, dumps_in, read_metrics, read_step
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
    """Rows whose advantage is 0, or that train nothing."""
    reward: float
    """Mean of the sessions."""
    is_recorded: bool
    """Whether its rows are, and not its laps alone."""
    packed: str

    @classmethod
    def of(cls, update: RecordedStep, texts: Mapping[str, DumpedText], *, whole_texts: bool) -> Self:
        rewards = {session_of_key(row.key): row.reward for row in update.rows}
        return cls(
            name=f"step-{update.step}-{update.update}",
            step=update.step,
            update=update.update,
            rows=len(update.keys),
            sessions=len(set(map(session_of_key, update.keys))),
            prompts=len(set(map(uid_of_key, update.keys))),
            tokens=sum(row.tokens for row in update.rows),
            trained_tokens=sum(row.trained_tokens for row in update.rows),
            idle_rows=sum(not row.advantage for row in update.rows),
            reward=fmean(rewards.values()) if rewards else math.nan,
            is_recorded=bool(update.rows),
            packed=packed(step_as_json(update, texts, whole_texts=whole_texts)),
        )


def write_report(run: Path, out: Path, *, steps: str | None, whole_texts: bool) -> None:
    """Writes the report of a run's folder, as the demo and the recipes' run scripts leave it.

    Args:
        steps: which recorded steps it has, as ``1,5,10-20``; None for all.
        whole_texts: False to cut texts short.

    Raises:
        PaddingDataError: the folder holds neither metrics nor recorded steps, or a file of them is refused.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise PaddingDataError(
            f"verl-padding report needs {error.name}: pip install 'verl_padding[report]'."
        ) from error
    curves = curves_of(run)
    recorded = {int(path.stem): path for path in dumps_in(run / FOLDER)}
    if not curves and not recorded:
        raise PaddingDataError(
            f"{run}: holds neither {METRICS} nor {FOLDER}/<step>.jsonl. Name the folder of a job that "
            "recorded its steps with padding.record=true."
        )
    summaries = [
        StepSummary.of(update, texts, whole_texts=whole_texts)
        for step in chosen_steps(sorted(recorded), steps)
        for texts in [read_texts(run / ROLLOUTS / f"{step}.jsonl")]
        for update in read_steps(recorded[step])
    ]
    environment = Environment(
        loader=PackageLoader("verl_padding.cli", "report_page"), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("page.html")
    assets = files("verl_padding.cli") / "report_page"
    with out.open("wb") as file:
        page.stream(
            run=run.resolve().name,
            version=__version__,
            summaries=summaries,
            curves=packed({"curves": curves, "first": [name for name in FIRST_CHARTS if name in curves]}),
            plotly=get_plotlyjs(),
            script=(assets / "page.js").read_text(encoding="utf-8"),
            style=(assets / "page.css").read_text(encoding="utf-8"),
        ).dump(file, encoding="utf-8")


def packed(data: Any) -> str:
    """JSON, compressed, in letters that HTML takes as they are; the page unpacks it when it is looked at."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def curves_of(run: Path) -> dict[str, list[tuple[int, float | None]]]:
    """(step, value) of each metric of a run, and of the mean reward of a session."""
    curves: dict[str, list[tuple[int, float | None]]] = {}
    metrics = dict(read_metrics(run))
    for step, data in metrics.items():
        for name, value in data.items():
            if isinstance(value, int | float):
                curves.setdefault(name, []).append((step, value if math.isfinite(value) else None))
    # As `RunCurves` has them: of steps that are logged.
    dumps = [path for path in dumps_in(run / ROLLOUTS) if int(path.stem) in metrics]
    rewards: list[tuple[int, float | None]] = [(rows.step, rows.reward) for rows in map(read_step, dumps)]
    return {SESSION_REWARD: rewards, **curves} if rewards else curves


def chosen_steps(recorded: Sequence[int], steps: str | None) -> list[int]:
    """The recorded ones of some steps."""
    if steps is None:
        return list(recorded)
    try:
        wanted = set(_numbers(steps))
    except ValueError as error:
        raise PaddingDataError(f"--steps {steps}: not numbers of steps. Write them as 1,5,10-20.") from error
    if not wanted & set(recorded):
        raise PaddingDataError(
            f"--steps {steps}: none of them is recorded. Choose from {recorded[0]} to {recorded[-1]}."
        )
    return [step for step in recorded if step in wanted]


def _numbers(steps: str) -> Iterator[int]:
    for part in steps.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
