"""Act 2: a step of the job on this machine's CPU, by verl's trainer, Ray, TransferQueue and FSDP2, its model shrunk."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.driver.trainers import asks_for_padding
from verl_padding.on_cpu.dry_run.failure import Failure, FailuresOfLog, RehearsalError, shortened
from verl_padding.on_cpu.dry_run.reduced_job import STEPS, reduced, write_shrunk_model
from verl_padding.on_cpu.launch import run_command
from verl_padding.on_cpu.scripted_replies import TEXTS
from verl_padding.plan.counted import counted
from verl_padding.runs.report import LOG, read_metrics

STAGES = {
    "Started a local Ray instance": "Ray",
    "(WorkerDict": "the workers",
    "(TransformersServer": "the rollout's server",
    "(AgentLoopWorker": "the agent loops",
    "step:1": "the first step",
}
"""What the log says -> the stage that the job has reached."""
CALLBACK = {"_target_": "verl_padding.entry.hydra_callback.CheckJobBeforeStart"}
SHOWN = ("padding/real_rows/total", "padding/pad_rows/total", "actor/grad_norm", "actor/pg_loss", "critic/score/mean")
OF_THE_ROLLOUT = "training/rollout_"
"""verl compares the rollout with the trainer in metrics of these names. Of scripted replies they say nothing."""
LAST = 12  # lines of the log that are shown where no exception is in it


def metrics_not_finite(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of metrics that are NaN in a step."""
    wrong = {name for step in steps for name, value in step.items() if math.isnan(value)}
    return sorted(name for name in wrong if not name.startswith(OF_THE_ROLLOUT))


def rehearse_step(
    config: DictConfig,
    *,
    folder: Path,
    timeout_s: float,
    replies: Sequence[str] = (),
    on_stage: Callable[[str], object] = lambda _: None,
    **of_reduced: Any,
) -> list[str]:
    """Runs one step, and a validation if the job validates; returns lines that say what came of it.

    Args:
        config: of the job; it is not changed.
        folder: an empty folder, into which all is written.
        replies: texts that the model says, among others.
        on_stage: is called with each stage that the job reaches.

    Raises:
        RehearsalError: the job has ended with an error, has not ended in time, or went on without a session or with a
            metric that is not finite.
    """
    started = time.monotonic()
    section = config.actor_rollout_ref.model
    try:
        model, attention = write_shrunk_model(section, folder / "model")
    except Exception as error:
        message = f"no small model can be made of {section.path}, so its step cannot be rehearsed"
        raise RehearsalError(message, stage="model", failures=[Failure.of(error)]) from error
    small, left_out = reduced(config, model=folder / "model", folder=folder, attention=attention, **of_reduced)
    with open_dict(small):
        small.hydra = {"run": {"dir": str(folder / "hydra")}}
        if asks_for_padding(small):  # which composing has taken out
            small.hydra.callbacks = {"verl_padding": CALLBACK}
    (folder / "config").mkdir()
    OmegaConf.save(small, folder / "config" / "job.yaml")
    of_log, reached = FailuresOfLog(), ["start"]

    def read(line: str) -> None:
        of_log.read(line)
        for words, stage in STAGES.items():
            if words in line and stage not in reached:
                reached.append(stage)
                on_stage(stage)

    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(folder / "config"), "--config-name", "job"]
    code, wrong = 0, ""
    with mock.patch.dict("os.environ", {TEXTS: json.dumps(list(replies))}):
        try:
            code = run_command(command, folder=folder, on_line=read, timeout_s=timeout_s, cwd=Path.cwd())
        except TimeoutError:
            wrong = f"the job has not ended in {timeout_s:.0f} s; it had reached {reached[-1]}"
    steps = [data for _, data in read_metrics(folder)]
    ended = f"the job has ended (exit code {code}) at {reached[-1]}" if code or len(steps) < STEPS else ""
    if wrong := _what_is_wrong(of_log, wrong or ended, steps):
        if wrong == ended and not of_log.failures():
            wrong = "\n".join([f"{wrong}:", *(folder / LOG).read_text().splitlines()[-LAST:]])
        raise RehearsalError(wrong, stage="step", failures=of_log.failures())
    shown = [[f"{name}={step[name]:.4g}" for name in SHOWN if name in step] for step in steps]
    return [
        f"{model}; {len(steps)} step(s) in {time.monotonic() - started:.0f} s",
        *map(", ".join, shown),
        *(f"not rehearsed: {each}" for each in left_out),
    ]


def _what_is_wrong(of_log: FailuresOfLog, ended: str, steps: Sequence[Mapping[str, float]]) -> str:
    """What a user has to know of a job, empty if it went well; ``ended`` is how it did, empty if as it should."""
    wrong = shortened(of_log.refusal) or ended
    if not wrong and (not_finite := metrics_not_finite(steps)):
        wrong = f"metrics are not finite: {', '.join(not_finite)}"
    if not of_log.failed_sessions:
        return wrong
    failed = f"{counted(of_log.failed_sessions, 'session')} failed, and verl went on without them"
    return f"{wrong}; {failed}" if wrong else failed
