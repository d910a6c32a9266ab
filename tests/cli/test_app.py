"""The command as a whole: versions, and the module that runs it."""

from importlib.metadata import version

from typer.testing import CliRunner

from verl_padding import __version__
from verl_padding.cli import app


def test_the_version_is_shown_with_those_that_a_report_needs():
    shown = CliRunner().invoke(app.app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith(
        f"verl_padding {__version__} (verl {version('verl')}, TransferQueue "
    )
    assert shown.output.count("\n") == 1
