"""Processes that have imported nothing of verl, of Ray or of ours."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fresh:
    """What runs in a process of its own.

    Args:
        arguments: of its command line.
        environment: variables that it has otherwise; None for one that it has not.
    """

    code: str
    arguments: list[str] = field(default_factory=list)
    environment: Mapping[str, str | None] = field(default_factory=dict)
    folder: str = "."


def run_fresh(case: Fresh) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    environment = {**os.environ, **case.environment}
    return subprocess.run(
        [sys.executable, "-c", case.code, *case.arguments],
        cwd=case.folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
