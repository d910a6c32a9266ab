"""A step of the job by verl's trainer, Ray, TransferQueue and FSDP2, on a CPU, its
model shrunk."""

import json
import math
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingError
from verl_padding.job.metric_names import GRAD_NORM, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.on_cpu.launch import TIMED_OUT, run_command
from verl_padding.on_cpu.reduced_job import MODEL, reduced, write_shrunk_model
from verl_padding.on_cpu.verl_patches import TEXTS
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.plan.row_keys import session_of_key
from verl_padding.record.run_files import (
    LOG,
    ROLLOUTS,
    ROW_REWARD,
    dumps_in,
    read_dump,
    read_metrics,
)

SHOWN = (REAL_ROWS_TOTAL, PAD_ROWS_TOTAL, GRAD_NORM, "actor/pg_loss", ROW_REWARD)
ROLLOUT_METRICS = "training/rollout_"
"""Prefix of metrics that compare the rollout with the trainer. They mean nothing for scripted
replies."""
SESSION_FAILED = "Error in _run_prompt"
"""What verl logs of a session that has failed, before it goes on without the session."""
DUMPED = {"uid": str, "input": str, "output": str, "score": float | int | None}
"""Field of a row in a rollout dump -> its type."""
FRAMES = 6  # of a traceback that are shown: the innermost ones
MAX_TEXT = 400  # characters of a text that are shown
MAX_LINES = 40  # of a job's output that are shown: from its first traceback on, and at its end


class DryRunError(PaddingError):
    """What is wrong with a job, in a sentence; and a traceback, or what the job has printed."""

    def __init__(self, message: str, details: str):
        super().__init__(message)
        self.details = details


def run_step(
    config: DictConfig,
    *,
    folder: Path,
    timeout_s: float,
    replies: Sequence[str] = (),
) -> list[str]:
    """Runs one step, and a validation if the job validates; returns lines that say what came of it.

    Args:
        config: of the job; it is not changed.
        folder: an empty folder, into which all is written.
        timeout_s: of the job, its start included.
        replies: texts of the model, among others.

    Raises:
        DryRunError: the job has ended with an error, has not ended in time, or went on without a
            session or with a metric that is not finite.
    """
    started = time.monotonic()
    path = config.actor_rollout_ref.model.path
    try:
        model, attention = write_shrunk_model(config.actor_rollout_ref.model, folder / "model")
    except PaddingError:
        raise
    except Exception as error:
        why = shorten(f"{type(error).__name__}: {error}", MAX_TEXT, placeholder=" ..")
        raise DryRunError(
            f"{MODEL}.path={path}: no small model can be made from it ({why}). Correct it.",
            traceback.format_exc(limit=-FRAMES),
        ) from error
    small, left_out = reduced(config, folder=folder, attention=attention)
    code = _run_job(small, folder, timeout_s, replies)
    log = (folder / LOG).read_text()
    steps = [data for _, data in read_metrics(folder)]
    not_finite, failed = metrics_not_finite(steps), log.count(SESSION_FAILED)
    wrong = {
        f"--timeout={timeout_s:.0f}: the job has not ended within this many seconds. Raise "
        "it, unless its step hangs": code == TIMED_OUT,
        f"the job has ended with exit code {code}": code not in (0, TIMED_OUT),
        "the job has ended without a step": code == 0 and not steps,
        f"metrics are not finite: {', '.join(not_finite)}": not_finite,
        f"{failed} sessions failed, and verl went on without them": failed,
    }
    if reward := re.search(r"PaddingDataError: (reward\..*)", log):
        raise DryRunError(reward[1], details="")
    if found := [what for what, is_so in wrong.items() if is_so]:
        raise DryRunError(f"step: {'; '.join(found)}", excerpt(log))
    dumped = [row for path in dumps_in(folder / ROLLOUTS) for row in read_dump(path, **DUMPED)]
    return [
        f"{model}; {len(steps)} step(s) in {time.monotonic() - started:.0f} s",
        *describe_rows(dumped),
        *map(describe_step, steps),
        *(f"left out: {each}" for each in left_out),
    ]


def _run_job(config: DictConfig, folder: Path, timeout_s: float, replies: Sequence[str]) -> int:
    """Runs a job by verl's own command, and returns its exit code."""
    OmegaConf.save(config, folder / "job.yaml")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"hydra.run.dir={folder}/hydra"]
    command += ["--config-path", str(folder), "--config-name", "job"]
    with mock.patch.dict("os.environ", {TEXTS: json.dumps(list(replies))}):
        return run_command(command, folder=folder, timeout_s=timeout_s, cwd=Path.cwd())


def metrics_not_finite(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of metrics that are NaN in a step."""
    wrong = {name for step in steps for name, value in step.items() if math.isnan(value)}
    return sorted(name for name in wrong if not name.startswith(ROLLOUT_METRICS))


def describe_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines about the rows of a rollout dump: sessions, rewards, and the texts of the longest."""
    rows = [row for row in rows if not row["uid"].startswith(PAD_UID_PREFIX)]  # stock verl's pads
    sessions = Counter(session_of_key(row["uid"]) for row in rows)
    sizes = [f"{size} ({n} sessions)" for size, n in sorted(Counter(sessions.values()).items())]
    yield f"{len(rows)} rows of {len(sessions)} sessions; rows a session: {', '.join(sizes)}"
    rewards = Counter(row["score"] for row in rows)
    counts = [f"{reward} ({n} rows)" for reward, n in rewards.most_common()]
    yield f"rewards: {', '.join(counts)}"
    # Most replies are short noise: the longest row shows the most of template, agent and tools.
    longest = max(rows, key=lambda row: len(row["input"] + row["output"]))
    for name in ("input", "output"):
        yield f"longest row, {name}: {shorten(longest[name], MAX_TEXT, placeholder=' ..')}"


def describe_step(step: Mapping[str, float]) -> str:
    """A line of some metrics, which says so where the step has trained nothing."""
    line = ", ".join(f"{name}={step[name]:.4g}" for name in SHOWN if name in step)
    if step.get(GRAD_NORM) == 0:
        line += (
            ". All gradients are zero, so losses were not tested, as when all replies to a prompt "
            "earn the same. Add one that earns more: --reply."
        )
    return line


def excerpt(log: str) -> str:
    """A job's output from its first traceback on, which others follow, and its end."""
    lines = log.splitlines()
    # The first is the cause; later ones are mostly of processes that it took along.
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent" in line]
    first = starts[0] if starts else max(len(lines) - MAX_LINES, 0)
    end = max(first + MAX_LINES, len(lines) - MAX_LINES)
    return "\n".join(lines[first : first + MAX_LINES] + lines[end:])
