"""``verl-padding doctor``: what it finds in an installation and in a job, each with the setting
that is why."""

import re
import subprocess
import sys
from importlib.metadata import requires
from io import StringIO

from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from verl_padding.cli.app import app
from verl_padding.cli.doctor.command import diagnose
from verl_padding.job.composition import JobArguments

FLAG = "+padding=prompt"


def diagnosed(*overrides):
    console = Console(width=400, record=True, file=StringIO())
    code = diagnose(JobArguments(overrides=overrides), console=console)
    return code, console.export_text()


def test_versions_and_plug_in_are_shown_where_all_is_well():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    bounds = {
        each.name for each in map(Requirement, requires("verl_padding") or []) if not each.marker
    }
    assert "verl" in bounds
    for shown in (*bounds, "loaded by verl", "replace verl's", "found by Hydra"):
        assert shown in result.output


def test_a_broken_plug_in_is_shown_with_what_failed_in_a_padded_job_too():
    code = (
        "import sys; sys.modules['verl_padding.job.verl_job'] = None\n"
        "from verl_padding.cli.app import app\n"
        f"app(['doctor', {FLAG!r}])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert re.search("wrong +plug-in", ended.stdout), ended.stdout


def test_a_job_that_can_run_is_described_and_hints_come_last(job):
    code, output = diagnosed(*job, FLAG)
    assert code == 0, output
    assert "prompt, 8 prompts x 4 sessions per batch" in output
    assert "4 optimizer steps per batch, 2 data-parallel ranks" in output
    assert "verl-padding dry-run" in output
    assert re.search(r"\nok .*\nhint .*padding\.packer=auto", output, re.DOTALL)
    assert not re.search(r"\nhint .*\nok ", output, re.DOTALL)
    code, output = diagnosed(*job)
    assert code == 0, output
    assert "the job trains without padding" in output
