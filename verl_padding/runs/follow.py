"""Runs a job's command and shows a line for each step: ``python -m verl_padding.runs.follow OUT COMMAND...``.

The command's whole output, Ray's and torch's too, goes to ``OUT/log``; if the command fails, the end of the log is
shown. The exit code is the command's. An error in here, such as a terminal that was closed, does not end the command.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from math import isnan, nan
from pathlib import Path

from verl_padding.job import metric_names
from verl_padding.job.calls import ACTOR
from verl_padding.runs.report import LOG, METRICS, ROLLOUTS, read_metrics

LAST_LINES = 30  # of the log, shown if the command fails
COLUMNS = {
    "row reward": (metric_names.ROW_REWARD, ".3f"),
    "rows": (metric_names.REAL_ROWS_TOTAL, ".0f"),
    "pads": (metric_names.PAD_ROWS_TOTAL, ".0f"),
    "steps taken": (metric_names.OPTIMIZER_STEPS.format(update=ACTOR), ".0f"),
    "fewest rows": (metric_names.REAL_ROWS_MIN.format(update=ACTOR), ".0f"),
    "grad norm": (metric_names.GRAD_NORM, ".3f"),
    "seconds": (metric_names.STEP_SECONDS, ".1f"),
}
"""Heading -> (metric, format) in the line of a step; "fewest rows" are those of the smallest optimizer step."""


class StepLines:
    """Lines of the steps that verl logs in a folder, each once, below a heading."""

    def __init__(self, folder: Path):
        self.shown = 0  # steps so far
        self._folder = folder
        self._earlier = read_metrics(folder)  # of an earlier job, not shown: verl will empty the file

    def new(self) -> Iterator[str]:
        """Lines of the steps that were logged since the last call; the heading comes before the first."""
        steps = read_metrics(self._folder)
        if steps == self._earlier:
            return
        self._earlier = []
        for step, data in steps[self.shown :]:
            if not self.shown:
                yield "  ".join(["step", *COLUMNS])
            self.shown += 1
            cells = [
                (format(data[metric], form) if not isnan(data.get(metric, nan)) else "-").rjust(len(heading))
                for heading, (metric, form) in COLUMNS.items()
            ]
            yield "  ".join([f"{step:>4}", *cells])


def follow(out: Path, command: Sequence[str]) -> int:
    """Runs a command to its end and shows the steps that it logs; returns its exit code, 128 + n if signal n ended it.

    verl's file logger writes ``metrics.jsonl`` into ``out``, which is made if missing, and the rollouts are expected in
    ``rollouts`` there. The log is appended to: a resumed job goes on with it.
    """
    out.mkdir(parents=True, exist_ok=True)
    steps = StepLines(out)
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(out / METRICS)}
    with (
        (out / LOG).open("ab") as log,
        # Waits for the job, also at an error in here.
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as job,
    ):
        # Ctrl-C and the end of the terminal reach the job by themselves: what it prints as it ends belongs to the log.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: job.terminate())
        print(f"The output of the job is in {out / LOG}.", flush=True)
        running = True
        while running:
            time.sleep(0.5)
            running = job.poll() is None
            for line in steps.new():
                print(line, flush=True)
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    if code:
        last = (out / LOG).read_text(errors="replace").splitlines()[-LAST_LINES:]
        print(*last, f"The job ended with code {code}; its output is in {out / LOG}.", sep="\n", file=sys.stderr)
    else:
        print(
            f"Metrics are in {out / METRICS}, rollouts in {out / ROLLOUTS}, the log in {out / LOG}; to draw them: "
            f"verl-padding compare {out} --picture {out / 'curves.png'}"
        )
    return code


if __name__ == "__main__":
    sys.exit(follow(Path(sys.argv[1]).resolve(), sys.argv[2:]))
