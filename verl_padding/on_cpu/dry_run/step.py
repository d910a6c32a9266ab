"""The step stage: a step of the job by verl's trainer, Ray, TransferQueue and FSDP2, on a CPU, its
model shrunk."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.driver.job_check import check_job
from verl_padding.driver.trainers import asks_for_padding
from verl_padding.on_cpu.dry_run.failure import DryRunError, traceback_of
from verl_padding.on_cpu.dry_run.reduced_job import STEPS, reduced, write_shrunk_model
from verl_padding.on_cpu.launch import run_command
from verl_padding.on_cpu.scripted_replies import TEXTS
from verl_padding.runs.run_files import LOG, read_metrics

SHOWN = (
    "padding/real_rows/total",
    "padding/pad_rows/total",
    "actor/grad_norm",
    "actor/pg_loss",
    "critic/score/mean",
)
ROLLOUT_METRICS = "training/rollout_"
"""Prefix of metrics that compare the rollout with the trainer. They mean nothing for scripted
replies."""
SESSION_FAILED = "Error in _run_prompt"
"""What verl logs of a session that has failed, before it goes on without the session."""
MAX_LINES = 40  # of a job's output that are shown: from its first traceback on, and at its end


def metrics_not_finite(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of metrics that are NaN in a step."""
    wrong = {name for step in steps for name, value in step.items() if math.isnan(value)}
    return sorted(name for name in wrong if not name.startswith(ROLLOUT_METRICS))


def run_step(
    config: DictConfig,
    *,
    folder: Path,
    timeout_s: float,
    replies: Sequence[str] = (),
    longest_row: int = 0,
) -> list[str]:
    """Runs one step, and a validation if the job validates; returns lines that say what came of it.

    Args:
        config: of the job; it is not changed.
        folder: an empty folder, into which all is written.
        replies: texts of the model, among others.
        longest_row: see :func:`reduced`.

    Raises:
        PaddingConfigError: the plug-in refuses the job.
        DryRunError: the job has ended with an error, has not ended in time, or went on without a
            session or with a metric that is not finite.
    """
    started = time.monotonic()
    path = config.actor_rollout_ref.model.path
    try:
        model, attention = write_shrunk_model(config.actor_rollout_ref.model, folder / "model")
    except Exception as error:
        message = f"step: no small model can be made of {path}, so it cannot be run here"
        raise DryRunError(message, [traceback_of(error)]) from error
    small, left_out = reduced(
        config, model=folder / "model", folder=folder, attention=attention, longest_row=longest_row
    )
    if asks_for_padding(small):
        check_job(small)
    with open_dict(small):
        small.hydra = {"run": {"dir": str(folder / "hydra")}}
    (folder / "config").mkdir()
    OmegaConf.save(small, folder / "config" / "job.yaml")
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(folder / "config"), "--config-name", "job"]
    wrong = []
    with mock.patch.dict("os.environ", {TEXTS: json.dumps(list(replies))}):
        try:
            code = run_command(command, folder=folder, timeout_s=timeout_s, cwd=Path.cwd())
            wrong += [f"the job has ended with exit code {code}"] if code else []
        except TimeoutError:
            wrong.append(f"the job has not ended in {timeout_s:.0f} s")
    steps = [data for _, data in read_metrics(folder)]
    if not wrong and len(steps) < STEPS:
        wrong.append("the job has ended without a step")
    if not_finite := metrics_not_finite(steps):
        wrong.append(f"metrics are not finite: {', '.join(not_finite)}")
    log = (folder / LOG).read_text()
    if failed := log.count(SESSION_FAILED):
        wrong.append(f"{failed} sessions failed, and verl went on without them")
    if wrong:
        raise DryRunError(f"step: {'; '.join(wrong)}", [excerpt(log)])
    shown = [[f"{name}={step[name]:.4g}" for name in SHOWN if name in step] for step in steps]
    return [
        f"{model}; {len(steps)} step(s) in {time.monotonic() - started:.0f} s",
        *map(", ".join, shown),
        *(f"left out: {each}" for each in left_out),
    ]


def excerpt(log: str) -> str:
    """A job's output from its first traceback on, which others follow, and its end."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent" in line]
    first = starts[0] if starts else max(len(lines) - MAX_LINES, 0)
    end = max(first + MAX_LINES, len(lines) - MAX_LINES)
    return "\n".join(lines[first : first + MAX_LINES] + lines[end:])
