"""Processes that have imported nothing of verl, of Ray or of ours."""

import os
import subprocess
import sys


def run_fresh(code, *arguments, platform, folder="."):
    """Runs code to its end in a process of its own, with these arguments and this VERL_PLATFORM, or
    none."""
    environment = os.environ | {"VERL_PLATFORM": platform}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
