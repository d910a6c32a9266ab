"""The recipes' run scripts: the doctor finds nothing wrong in what they give to verl."""

import re

import pytest
from typer.testing import CliRunner

from tests.support.pages import ROOT, job_of
from tests.support.verl_config import compose_job
from verl_padding.cli.app import app
from verl_padding.driver.job_check import check_job
from verl_padding.job.verl_job import VerlJob

GPU_SCRIPTS = [path for path in (ROOT / "recipes").glob("*/run_*.sh") if "cpu" not in path.name]
FLAG = r"\$\{PADDING-\+padding=(fast|prompt)( padding\.(optimizer_steps=configured|record=true))?\}"


@pytest.mark.parametrize("path", GPU_SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_override_of_a_gpu_script_is_one_of_verls_config(path):
    script = re.sub(FLAG, "x", path.read_text())
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


@pytest.mark.parametrize(
    ("script", "choice", "loop"),
    [
        ("context_reset/run_tiny_cpu.sh", {"IMAGES": "1"}, "context_reset"),
        ("every_call/run_tiny_cpu.sh", {}, "every_call"),
        ("every_call/run_tiny_cpu.sh", {"THINKING": "1"}, "every_call_thinking"),
        ("subagents/run_tiny_cpu.sh", {}, "subagents_tiny"),
        ("guess/run_cpu.sh", {}, "guess"),
    ],
)
def test_the_doctor_passes_a_tiny_job_as_its_script_starts_it(
    script, choice, loop, tmp_path, monkeypatch
):
    path = ROOT / "recipes" / script
    job = job_of(path, OUT=str(tmp_path), **choice)
    assert compose_job(*job).actor_rollout_ref.rollout.agent.default_agent_loop == loop
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.syspath_prepend(path.parent)
    ended = CliRunner().invoke(app, ["doctor", *job])
    assert ended.exit_code == 0, ended.output
