"""The recipe of docs/quickstart.md and the job of docs/your_job.md, by the pages' own files and
commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.support.pages import DOCS, commands_of, make_own_recipe, own_recipe_text, read
from tests.support.verl_config import compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.on_cpu.launch import LOG, run_command

YOUR_JOB = read(DOCS / "your_job.md")
NOT_USED = {"reward.reward_model.rollout.name"}
"""Mandatory in verl's own config, and read only with a reward model."""

JOB_OF = """
verl-padding() { echo "doctor" "$@" >> called; }
python() { printf '%s\\n' "${@:3}" > job; echo "$2" >> called; }
"""
"""Commands of a script, met by functions that note how they are called."""


def job_of(script: str, folder: Path) -> list[str]:
    """The overrides that a script of the page gives to verl's trainer; it has asked the doctor
    about the same ones."""
    (folder / "called").unlink(missing_ok=True)
    code = f"{JOB_OF}\nset --\n{(folder / script).read_text()}"
    subprocess.run(["/bin/bash", "-c", code], cwd=folder, check=True)
    doctor, trainer = (folder / "called").read_text().splitlines()
    job = (folder / "job").read_text().splitlines()
    assert trainer == "verl.trainer.main_ppo"
    assert doctor.split() == ["doctor", "doctor", *job]
    return job


def complete(overrides: list[str]) -> bool:
    """Whether nothing is left at ``???`` in the job that is composed of them."""
    return OmegaConf.missing_keys(compose_job(*overrides)) <= NOT_USED


@pytest.mark.parametrize("script", ["cpu.sh", "gpu.sh"])
def test_both_jobs_are_complete_and_can_be_planned(script, own_recipe):
    overrides = [
        each
        for each in job_of(script, own_recipe)
        if not each.startswith("trainer.v1.trainer_mode=")
    ]
    assert complete(overrides)
    config = compose_job(*overrides)
    assert check_job(config).padding.strategy == "prompt"
    assert config.trainer.device == ("cpu" if script == "cpu.sh" else "cuda")
    assert config.actor_rollout_ref.rollout.name == (
        "transformers" if script == "cpu.sh" else "vllm"
    )
    assert "file" in config.trainer.logger


def test_the_job_of_your_job_is_complete_with_and_without_the_flag(own_recipe):
    (code,) = [code for code in commands_of(YOUR_JOB) if "overrides=(" in code]
    command = ["/bin/bash", "-c", code + 'printf "%s\\n" "${overrides[@]}"']
    overrides = subprocess.check_output(command, cwd=own_recipe, text=True).splitlines()
    assert len(overrides) > 10
    assert complete(overrides)
    assert complete(["+padding=prompt", *overrides])
    assert check_job(compose_job("+padding=prompt", *overrides)).padding.strategy == "prompt"
    assert not complete([each for each in overrides if each != "+local=cpu"]), (
        "known to be able to fail"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_recipe_runs_as_it_is_printed(tmp_path):
    folder = make_own_recipe(tmp_path)
    _, _, try_it, run_it, _ = commands_of(own_recipe_text())
    # The page's own exports only: what `run_command` adds must not stand in for one that is
    # missing.
    script = (
        'exec env -i HOME="$HOME" PATH="$1:$PATH" TMPDIR="$TMPDIR" RAY_TMPDIR="$RAY_TMPDIR"'
        ' /bin/bash -c "$2"'
    )
    command = ["/bin/bash", "-c", script, "bash", str(Path(sys.executable).parent), try_it]
    assert run_command(command, folder=folder, timeout_s=900) == 0, (folder / LOG).read_text()[
        -5000:
    ]

    steps = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        data = step["data"]
        # A row for each guess: what the reward function was told and what was planned are the same
        # rows.
        assert data["padding/real_rows/total"] > 256
        assert data["padding/real_rows/total"] == pytest.approx(256 * data["guess/guesses"])
        assert data["padding/actor/optimizer_steps/total"] == 4
        rows = (folder / "run" / "rollouts" / f"{step['step']}.jsonl").read_text().splitlines()
        assert len(rows) == data["padding/real_rows/total"]
    assert 0 <= steps[-1]["data"]["val-aux/guess/found/mean@1"] <= 1
    assert "Error in _run_prompt" not in (folder / "run" / "log").read_text()

    (report,) = [line for line in run_it.splitlines() if line.startswith("verl-padding report")]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(report.split(), cwd=folder, env=environment, check=True)
    assert (folder / "run.html").stat().st_size > 10_000
