"""``verl-padding doctor``: what it finds in an installation and in a job, each with the setting
that is why."""

import re
import subprocess
import sys
from importlib.metadata import requires
from io import StringIO

import pytest
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from verl_padding.cli.app import app
from verl_padding.cli.doctor import installation
from verl_padding.cli.doctor.command import diagnose
from verl_padding.cli.doctor.job import check_job_of
from verl_padding.job.composition import JobArguments

FLAG = "+padding=prompt"


@pytest.fixture(autouse=True)
def _on_this_cpu(monkeypatch):
    """What else runs on this machine is nothing to these jobs."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def diagnosed(*overrides):
    console = Console(width=400, record=True, file=StringIO())
    code = diagnose(JobArguments(overrides=overrides), console=console)
    return code, console.export_text()


def findings(*overrides):
    """Subject -> (verdict, message)."""
    found = check_job_of(JobArguments(overrides=overrides))
    return {each.subject: (each.verdict, each.message) for each in found}


def test_versions_and_plug_in_are_shown_where_all_is_well():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    bounds = {
        each.name for each in map(Requirement, requires("verl_padding") or []) if not each.marker
    }
    assert "verl" in bounds
    for shown in (*bounds, "loaded by verl", "in the place of verl's", "found by Hydra"):
        assert shown in result.output


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(monkeypatch):
    monkeypatch.setattr(
        installation, "_installed", lambda name: {"verl": "0.8.0", "ray": None}.get(name, "99.0")
    )
    found = {finding.subject: finding for finding in installation.versions()}
    assert found["verl"].verdict == "wrong"
    needed = {each.name: each for each in map(Requirement, requires("verl_padding") or [])}
    assert f"pip install '{needed['verl']}'" in found["verl"].message
    assert found["ray"].message.startswith("missing")
    assert found["wrapt"].verdict == "wrong"


@pytest.mark.parametrize(
    ("before", "failed"),
    [
        ("import sys; sys.modules['verl_padding.job.verl_job'] = None", "trainers"),
        pytest.param(
            "import os; os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'",
            "VERL_USE_EXTERNAL_PLUGINS",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_plug_in_is_shown_with_what_failed_in_a_padded_job_too(before, failed):
    code = (
        f"{before}\nimport sys; from verl_padding.cli.app import app; sys.argv = ['doctor',"
        f" 'doctor', {FLAG!r}]; app()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert re.search(rf"wrong +{failed}", ended.stdout), ended.stdout


def test_a_job_that_can_run_is_described_and_hints_come_last(job):
    code, output = diagnosed(*job, FLAG)
    assert code == 0, output
    assert "prompt, 8 prompts x 4 sessions per batch" in output
    assert "4 optimizer steps per batch, 2 data-parallel ranks" in output
    assert "verl-padding dry-run" in output
    assert re.search(r"\nok .*\n\nWhat .*\nhint .*padding\.packer=auto", output, re.DOTALL)
    code, output = diagnosed(*job)
    assert code == 0, output
    assert "the job trains without padding" in output


def test_a_config_of_ones_own_is_found_as_hydra_finds_it(job, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ndata: {max_response_length: 99999}\n"
    )
    options = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    result = CliRunner().invoke(app, ["doctor", *options, *job, FLAG])
    assert result.exit_code == 0
    assert "max_response_length" in result.output


WRONG = (
    "actor_rollout_ref.rollout.m=4",
    "padding.strategy=promt",
    "trainer.v1.trainer_mode=synk",
    "trainer.v1.trainer_mode=padded_sync",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=eight",
)
"""Overrides with which a job cannot start."""


@pytest.mark.parametrize("override", WRONG)
def test_what_keeps_a_job_from_starting_is_shown_with_its_setting(override, job):
    found = findings(*job, FLAG, override)
    shown = [
        subject + message for subject, (verdict, message) in found.items() if verdict == "wrong"
    ]
    assert len(shown) == 1
    assert override.split(".")[-1].split("=")[0] in shown[0]


def test_a_section_that_is_null_is_no_fault_of_the_doctor(job):
    assert "could not be checked" not in str(findings(*job, FLAG, "data.custom_cls=null"))


def test_a_budget_below_a_row_is_warned_of(job):
    setting = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    verdict, message = findings(*job, FLAG, f"{setting}=512")[setting]
    assert verdict == "warning"
    assert message.startswith("512")


def test_ulysses_ranks_that_cannot_share_heads_are_named_with_the_setting(job):
    setting = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    attention = "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"
    found = findings(*job, FLAG, f"{setting}=4", "trainer.n_gpus_per_node=4", attention)
    verdict, message = found[setting]
    assert verdict == "wrong"
    assert "2 heads" in message
