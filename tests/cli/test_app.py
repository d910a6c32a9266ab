"""The command as a whole: its version, and the module that runs it."""

import subprocess
import sys

from typer.testing import CliRunner

from verl_padding import __version__
from verl_padding.cli import app


def test_the_version_is_shown():
    shown = CliRunner().invoke(app.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"verl_padding {__version__}\n")


def test_the_module_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "verl_padding", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: verl-padding" in run.stdout
    named = ("demo", "plan", "doctor", "dry-run", "report", "tiny-model", "--version")
    assert all(name in run.stdout for name in named)
