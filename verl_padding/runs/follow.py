"""Runs a job's command and tells of it what is worth reading: ``python -m verl_padding.runs.follow OUT COMMAND...``.

The command's whole output, Ray's and torch's too, goes to ``OUT/log``. What is shown is a line for each step, and at
the end where everything is; if the command fails, the end of the log instead. The exit code is the command's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from verl_padding.runs.report import LOG, METRICS, ROLLOUTS
from verl_padding.runs.step_lines import StepLines

LAST_LINES = 30
"""Lines of the log that are shown if the command fails."""


def follow(out: Path, command: Sequence[str]) -> int:
    """Runs a command to its end and prints what is worth reading.

    Args:
        out: the job's folder, made if missing: verl's file logger is told to write its ``metrics.jsonl`` there, and the
            rollouts are expected in ``rollouts`` there.

    Returns: the command's exit code; 128 + n if signal n ended it.
    """
    out.mkdir(parents=True, exist_ok=True)
    print(f"What the job says is in {out / LOG}.", flush=True)
    steps, last = StepLines(out), deque[str](maxlen=LAST_LINES)
    with (
        open(out / LOG, "w", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            command,
            env=os.environ | {"VERL_FILE_LOGGER_PATH": str(out / METRICS)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as job,
    ):
        # Ctrl-C reaches the job by itself: what it says as it ends belongs to the log.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: job.terminate())
        assert job.stdout is not None
        for line in job.stdout:
            log.write(line)
            last.append(line)
            for told in steps.new():
                print(told, flush=True)
    for told in steps.new():
        print(told, flush=True)
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    if code:
        print(f"{''.join(last)}The job ended with code {code}; its output is in {out / LOG}.", file=sys.stderr)
    else:
        print(
            f"Metrics are in {out / METRICS}, rollouts in {out / ROLLOUTS}, the log in {out / LOG}; to draw them: "
            f"verl-padding compare {out} --picture {out / 'curves.png'}"
        )
    return code


if __name__ == "__main__":
    sys.exit(follow(Path(sys.argv[1]).resolve(), sys.argv[2:]))
