"""Runs a job's command and tells of it what is worth reading: ``python -m verl_padding.runs.follow OUT COMMAND...``.

The command's whole output, Ray's and torch's too, goes to ``OUT/log``. What is shown is a line for each step, and at
the end where everything is; if the command fails, the end of the log instead. The exit code is the command's, and what
cannot be shown, on a terminal that was closed for instance, does not end the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from verl_padding.runs.faults import Faults
from verl_padding.runs.report import LOG, METRICS, ROLLOUTS
from verl_padding.runs.step_lines import StepLines

LAST_LINES = 30
"""Lines of the log that are shown if the command fails."""


def follow(out: Path, command: Sequence[str]) -> int:
    """Runs a command to its end and prints what is worth reading.

    Args:
        out: the job's folder, made if missing: verl's file logger is told to write its ``metrics.jsonl`` there, and the
            rollouts are expected in ``rollouts`` there. The log is appended to: a resumed job goes on with it.

    Returns: the command's exit code; 128 + n if signal n ended it.
    """
    out.mkdir(parents=True, exist_ok=True)
    steps, last = StepLines(out), deque[str](maxlen=LAST_LINES)
    faults = Faults(lambda sentence: _say(sentence, sys.stderr))
    with faults.told_once():
        _say(f"What the job says is in {out / LOG}.", sys.stdout)
    with (
        # Unbuffered: what a full disk did not take is not tried again, and fails no later line.
        open(out / LOG, "ab", buffering=0) as log,
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
        # Ctrl-C and the end of the terminal reach the job by themselves: what it says as it ends belongs to the log.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: job.terminate())
        assert job.stdout is not None
        for line in job.stdout:
            last.append(line)
            with faults.told_once():
                log.write(line.encode())
            with faults.told_once():
                _say_new(steps)
    with faults.told_once():
        _say_new(steps)
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    with faults.told_once():
        _say_end(out, code, last)
    return code


def _say_new(steps: StepLines) -> None:
    for told in steps.new():
        _say(told, sys.stdout)


def _say_end(out: Path, code: int, last: Iterable[str]) -> None:
    if code:
        _say(f"{''.join(last)}The job ended with code {code}; its output is in {out / LOG}.", sys.stderr)
    else:
        _say(
            f"Metrics are in {out / METRICS}, rollouts in {out / ROLLOUTS}, the log in {out / LOG}; to draw them: "
            f"verl-padding compare {out} --picture {out / 'curves.png'}",
            sys.stdout,
        )


def _say(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # The rest in the stream's buffer would fail again as Python ends, and change the exit code.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        raise


if __name__ == "__main__":
    sys.exit(follow(Path(sys.argv[1]).resolve(), sys.argv[2:]))
