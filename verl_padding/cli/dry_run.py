"""The command ``verl-padding dry-run``: runs a job small, on this machine's CPU, before it runs
large."""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from verl_padding.cli.job_config import compose_or_refuse, quiet_imports
from verl_padding.errors import PaddingError
from verl_padding.job.composition import JobArguments
from verl_padding.on_cpu.dry_run import DryRunError, run_step


def dry_run(
    arguments: JobArguments, *, console: Console, replies: Sequence[str], timeout_s: float
) -> int:
    """Runs a step of a job, and shows what came of it; returns 1 if something is wrong, else 0.

    Args:
        replies: of the model in sessions, among noise and calls of tools.
        timeout_s: seconds that the job may take.
    """
    os.environ["VERL_PLATFORM"] = "cpu"  # verl reads it when it is imported
    sys.path.insert(0, os.getcwd())
    console.print(
        "This runs the code that the job's config names, a few times: data set, agent loops, "
        "tools, rewards, optimizer, callbacks. verl opens what rows name, such as images."
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    try:
        config = compose_or_refuse(arguments)
        with quiet_imports():
            from verl_padding.driver.job_check import check_job
        if config.get("padding") is not None and (savings := check_job(config).savings.lines()):
            console.print(Text("\n  ".join(["savings:", *savings])), soft_wrap=True)
        with (
            tempfile.TemporaryDirectory(prefix="dry-run-", ignore_cleanup_errors=True) as folder,
            console.status("a step of the job, on this machine's CPU"),
        ):
            lines = run_step(config, folder=Path(folder), replies=replies, timeout_s=timeout_s)
        console.print(Text("\n  ".join(["step:", *lines])), soft_wrap=True)
    except PaddingError as refusal:
        console.print(Text(str(refusal), style="red"), soft_wrap=True)
        if isinstance(refusal, DryRunError) and refusal.details:
            console.print(Text.from_ansi(refusal.details), soft_wrap=True)
        return 1
    console.print(Text("The dry run went well.", style="green"))
    return 0
