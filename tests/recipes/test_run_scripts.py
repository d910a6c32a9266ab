"""The recipes' jobs and run scripts: all fit verl's config, and scripts look at a job before
they start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.verl_config import compose_job
from verl_padding.cli.app import app
from verl_padding.driver.job_check import check_job
from verl_padding.job.verl_job import VerlJob
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.every_call import job as every_call
from verl_padding.recipes.subagents import job as subagents

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SCRIPTS = sorted(RECIPES.glob("*/run_*.sh"))
GPU_SCRIPTS = [path for path in SCRIPTS if "cpu" not in path.name]
QUICK = ("context_reset",)
"""Recipes whose script is run up to its job: the others begin as it does, and that of guess is
run by tests/test_own_recipe.py."""


FLAG = r"\$\{PADDING-\+padding=(fast|prompt)( padding\.(optimizer_steps=configured|record=true))?\}"


@pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("*/*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_the_shell_can_read_it(path):
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_doctor_comes_before_the_job_and_the_page_after_it(path):
    script = path.read_text()
    doctor = script.index('\nverl-padding doctor "${job[@]}"\n')
    job = (
        'python -m verl.trainer.main_ppo "${job[@]}" hydra.run.dir="${out}/hydra" 2>&1 | tee -a'
        ' "${out}/log"\n'
    )
    assert doctor < script.index(job) < script.index('\nverl-padding report "${out}"')
    assert "rollout_data_dir=" in script
    assert re.search(FLAG, script)
    assert "set -euo pipefail" in script


@pytest.mark.parametrize("path", GPU_SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_override_of_a_gpu_script_is_one_of_verls_config(path):
    script = path.read_text()
    script = re.sub(FLAG, "x", script)
    words = re.sub(r"\$\{?[\w-]+\}?|\"", "x", script[script.index("job=(") : script.index("\n)")])
    overrides = [word for word in words.split()[1:] if "=" in word]
    assert len(overrides) >= 8
    config = compose_job("+padding=prompt", *overrides)
    padding = check_job(config).padding
    assert padding.strategy == "prompt"
    engine = VerlJob(config, padding, "sync").engines["actor"]
    assert (engine.strategy, engine.dp_size) == (
        ("megatron", 2) if "megatron" in path.name else ("fsdp2", 8)
    )
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == path.parent.name
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 24576


@pytest.mark.parametrize(
    ("job", "settings", "loop"),
    [
        (context_reset, {"images": True}, "context_reset"),
        (every_call, {}, "every_call"),
        (every_call, {"thinking": True}, "every_call_thinking"),
        (subagents, {}, "subagents_tiny"),
    ],
)
def test_the_tiny_job_is_a_job_that_verl_and_the_plugin_accept(job, settings, loop, tmp_path):
    config = compose_job("+local=cpu", *job.tiny_job(tmp_path, **settings), "+padding=fast")
    assert check_job(config).has_vision == settings.get("images", False)
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.default_agent_loop == loop
    assert Path(agent.agent_loop_config_path).is_file()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.parent.name in QUICK else pytest.mark.slow)
        for path in SCRIPTS
        if "cpu" in path.name
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_the_doctor_passes_a_tiny_job_as_its_script_starts_it(path, tmp_path, monkeypatch):
    script = path.read_text()
    doctor = 'verl-padding doctor "${job[@]}"\n'
    until = script[: script.index(doctor)] + 'printf "%s\\n" "${job[@]}" > "${out}/job"\n'
    # For where the environment is not activated.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    subprocess.run(["bash", "-c", until], cwd=path.parent, check=True)
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    job = (tmp_path / "job").read_text().splitlines()
    ended = CliRunner().invoke(app, ["doctor", *job])
    assert ended.exit_code == 0, ended.output
