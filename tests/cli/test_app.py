"""The command as a whole: its version, and the module that runs it."""

from typer.testing import CliRunner

from verl_padding import __version__
from verl_padding.cli import app


def test_the_version_is_shown():
    shown = CliRunner().invoke(app.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"verl_padding {__version__}\n")
