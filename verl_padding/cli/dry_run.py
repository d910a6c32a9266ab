"""The command ``verl-padding dry-run``: runs a job small, on this machine's CPU, before it runs
large."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from verl_padding.doctor.job_config import compose_or_refuse
from verl_padding.errors import PaddingError
from verl_padding.job.composition import JobArguments
from verl_padding.on_cpu.dry_run.failure import DryRunError

MAX_FAILURES = 3  # kinds of failures of sessions that are shown


def dry_run(
    arguments: JobArguments,
    *,
    console: Console,
    replies: Sequence[str],
    only: str = "all",
    timeout_s: float,
) -> int:
    """Runs both stages, or the ``only`` one, ``sessions`` or ``step``; returns 1 if something is
    wrong, else 0.

    Args:
        replies: of the model in sessions, among noise and calls of tools.
        timeout_s: seconds that each stage may take.
    """
    os.environ["VERL_PLATFORM"] = "cpu"  # verl reads it when it is imported
    sys.path.insert(0, os.getcwd())
    console.print(
        "This runs the job's own code: data set, agent loops, tools and rewards, a few times each."
    )
    longest_row = 0
    try:
        config = compose_or_refuse(arguments)
        if only != "step":
            longest_row = _run_sessions(config.copy(), console, replies, timeout_s)
        if only != "sessions":
            _run_step(config, console, replies, timeout_s, longest_row)
    except PaddingError as refusal:
        console.print(Text(str(refusal), style="red"), soft_wrap=True)
        details = refusal.details if isinstance(refusal, DryRunError) else ()
        for each in details[:MAX_FAILURES]:
            console.print(Text.from_ansi(each), soft_wrap=True)
        return 1
    console.print(Text("The dry run went well.", style="green"))
    return 0


def _run_sessions(
    config: DictConfig, console: Console, replies: Sequence[str], timeout_s: float
) -> int:
    """Simulates sessions, shows what came of them, and returns the tokens of the longest row."""
    from verl_padding.on_cpu.dry_run.sessions import (
        describe_sessions,
        find_problems,
        simulate_sessions,
    )

    started = time.process_time()
    simulated = simulate_sessions(config, replies=replies, timeout_s=timeout_s)
    turned_off = [f"left out: {each}" for each in simulated.turned_off]
    seconds = f"{time.process_time() - started:.0f} CPU seconds"
    _print_lines(console, "sessions", [*describe_sessions(simulated), *turned_off, seconds])
    wrong = find_problems(simulated, config)
    if failed := simulated.failures.total():
        wrong.append(f"{failed} sessions have failed, and verl would go on without them")
    elif not simulated.rows:
        wrong.append("no row came of them")
    if wrong:
        details = [failure for failure, _ in simulated.failures.most_common()]
        raise DryRunError(f"sessions: {'; '.join(wrong)}", details)
    return max(len(row.fields["input_ids"]) for row in simulated.rows)


def _run_step(
    config: DictConfig,
    console: Console,
    replies: Sequence[str],
    timeout_s: float,
    longest_row: int,
) -> None:
    from verl_padding.driver.job_check import check_job
    from verl_padding.driver.trainers import asks_for_padding
    from verl_padding.on_cpu.dry_run.step import run_step

    if asks_for_padding(config):
        _print_lines(console, "savings", check_job(config).savings.lines())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    with (
        tempfile.TemporaryDirectory(prefix="dry-run-", ignore_cleanup_errors=True) as folder,
        console.status("a step of the job, on this machine's CPU"),
    ):
        lines = run_step(
            config,
            folder=Path(folder),
            replies=replies,
            timeout_s=timeout_s,
            longest_row=longest_row,
        )
    _print_lines(console, "step", lines)


def _print_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(f"{title}:", style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)
