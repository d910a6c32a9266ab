"""The command ``verl-padding dry-run``: runs a job small, on this machine's CPU, before it runs
large."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from datasets import disable_progress_bars
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.own_files import own_files
from verl_padding.on_cpu.dry_run.failure import DryRunError, Failure, time_limit


def dry_run(
    arguments: JobArguments,
    *,
    console: Console,
    replies: Sequence[str],
    only: str = "all",
    with_tools: bool = True,
    with_rewards: bool = True,
    timeout_s: float,
) -> int:
    """Runs both stages, or the ``only`` one, ``sessions`` or ``step``; returns 1 if something is
    wrong, else 0.

    Args:
        replies: of the model in sessions, among noise and calls of tools.
        timeout_s: seconds that each stage may take.
    """
    os.environ["VERL_PLATFORM"] = "cpu"
    sys.path.insert(0, os.getcwd())
    console.print(
        "This runs the job's own code: data set, agent loops, tools and rewards, a few times each."
    )
    try:
        config = compose_job(arguments)
        # Only now: verl reads VERL_PLATFORM when it is imported. A module that is missing is shown
        # as a setting is.
        import verl_padding.on_cpu.dry_run.sessions
        import verl_padding.on_cpu.dry_run.step  # noqa: F401
    except Exception as error:
        return _show(
            DryRunError(str(error), stage="settings", failures=[Failure.of(error)]), {}, console
        )
    show = partial(_show, files=own_files(config), console=console)
    code = {"with_tools": with_tools, "with_rewards": with_rewards}
    longest_row = 0
    try:
        if only != "step":
            # What verl and its libraries print of each prompt is kept out of the report.
            disable_progress_bars()
            with (
                time_limit(timeout_s, show),
                catch_warnings(action="ignore"),
                redirect_stdout(StringIO()),
            ):
                longest_row = _sessions(config.copy(), console, replies=replies, **code)
        if only != "sessions":
            _step(
                config,
                console,
                replies=replies,
                timeout_s=timeout_s,
                longest_row=longest_row,
                **code,
            )
    except DryRunError as failure:
        return show(failure)
    console.print(Text("The dry run went well.", style="green"))
    return 0


def _sessions(config: DictConfig, console: Console, **options: Any) -> int:
    """Simulates sessions, shows what came of them, and returns the tokens of the longest row."""
    from verl_padding.on_cpu.dry_run.sessions import description, problems, simulate_sessions

    started = time.process_time()
    simulated = simulate_sessions(config, **options)
    _show_lines(
        console,
        "sessions",
        [*description(simulated), f"{time.process_time() - started:.0f} CPU seconds"],
    )
    for each in simulated.left_out:
        console.print(Text(f"  left out: {each}"), soft_wrap=True)
    for message, count in simulated.logged.most_common():
        console.print(Text(f"  logged {count} times: {message}", style="yellow"), soft_wrap=True)
    wrong = list(problems(simulated, config))
    if simulated.failures or wrong or not simulated.rows:
        failed = sum(failure.count for failure in simulated.failures.values())
        why = (
            f"{failed} sessions have failed, and verl would go on without them"
            if failed
            else "no row came of them"
        )
        raise DryRunError(
            "; ".join(wrong) or why, stage="sessions", failures=[*simulated.failures.values()]
        )
    return max(len(row.fields["input_ids"]) for row in simulated.rows)


def _step(config: DictConfig, console: Console, **options: Any) -> None:
    from verl_padding.on_cpu.dry_run.step import run_step

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    with (
        tempfile.TemporaryDirectory(prefix="dry-run-", ignore_cleanup_errors=True) as folder,
        console.status("a step of the job, on this machine's CPU"),
    ):
        lines = run_step(config, folder=Path(folder), **options)
    _show_lines(console, "step", lines)


def _show_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(f"{title}:", style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _show(failure: DryRunError, files: Mapping[str, str], console: Console) -> int:
    console.print(Text(f"{failure.stage}: {failure}", style="red"), soft_wrap=True)
    for each in failure.failures[:3]:
        for line in each.lines(files):
            console.print(Text(line), soft_wrap=True)
    return 1
