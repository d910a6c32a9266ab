"""The step stage: a step of the job by verl's trainer, Ray, TransferQueue and FSDP2, on a CPU, its
model shrunk."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.driver.trainers import asks_for_padding
from verl_padding.on_cpu.dry_run.failure import DryRunError, Failure, FailuresOfLog, shortened
from verl_padding.on_cpu.dry_run.reduced_job import STEPS, reduced, write_shrunk_model
from verl_padding.on_cpu.launch import run_command
from verl_padding.on_cpu.scripted_replies import TEXTS
from verl_padding.plan.plural import plural
from verl_padding.runs.run_files import LOG, read_metrics

CALLBACK = {"_target_": "verl_padding.entry.hydra_callback.CheckJobBeforeStart"}
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
LOG_LINES = 12  # that are shown where no exception is in the log


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
    **reduced_options: Any,
) -> list[str]:
    """Runs one step, and a validation if the job validates; returns lines that say what came of it.

    Args:
        config: of the job; it is not changed.
        folder: an empty folder, into which all is written.
        replies: texts of the model, among others.

    Raises:
        DryRunError: the job has ended with an error, has not ended in time, or went on without a
            session or with a metric that is not finite.
    """
    started = time.monotonic()
    section = config.actor_rollout_ref.model
    try:
        model, attention = write_shrunk_model(section, folder / "model")
    except Exception as error:
        message = f"no small model can be made of {section.path}, so its step cannot be run here"
        raise DryRunError(message, stage="model", failures=[Failure.of(error)]) from error
    small, left_out = reduced(
        config, model=folder / "model", folder=folder, attention=attention, **reduced_options
    )
    with open_dict(small):
        small.hydra = {"run": {"dir": str(folder / "hydra")}}
        if asks_for_padding(small):  # which composing has taken out
            small.hydra.callbacks = {"verl_padding": CALLBACK}
    (folder / "config").mkdir()
    OmegaConf.save(small, folder / "config" / "job.yaml")
    of_log = FailuresOfLog()
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(folder / "config"), "--config-name", "job"]
    ended = ""
    with mock.patch.dict("os.environ", {TEXTS: json.dumps(list(replies))}):
        try:
            code = run_command(
                command, folder=folder, on_line=of_log.read, timeout_s=timeout_s, cwd=Path.cwd()
            )
        except TimeoutError:
            code, ended = 1, f"the job has not ended in {timeout_s:.0f} s"
    steps = [data for _, data in read_metrics(folder)]
    if not ended and (code or len(steps) < STEPS):
        ended = f"the job has ended (exit code {code})"
    if wrong := _what_is_wrong(of_log, ended, steps):
        if wrong == ended and not of_log.failures():
            last_lines = (folder / LOG).read_text().splitlines()[-LOG_LINES:]
            wrong = "\n".join([f"{wrong}:", *last_lines])
        raise DryRunError(wrong, stage="step", failures=of_log.failures())
    shown = [[f"{name}={step[name]:.4g}" for name in SHOWN if name in step] for step in steps]
    return [
        f"{model}; {len(steps)} step(s) in {time.monotonic() - started:.0f} s",
        *map(", ".join, shown),
        *(f"left out: {each}" for each in left_out),
    ]


def _what_is_wrong(of_log: FailuresOfLog, ended: str, steps: Sequence[Mapping[str, float]]) -> str:
    """What is wrong with a job, or ""; ``ended`` is how it ended, "" if as it should."""
    wrong = shortened(of_log.refusal) or ended
    if not wrong and (not_finite := metrics_not_finite(steps)):
        wrong = f"metrics are not finite: {', '.join(not_finite)}"
    if not of_log.failed_sessions:
        return wrong
    failed = f"{plural(of_log.failed_sessions, 'session')} failed, and verl went on without them"
    return f"{wrong}; {failed}" if wrong else failed
