"""Each code block of README, docs and recipes, run by bash or Python as it stands, in a folder laid
out as a checkout.

What takes minutes is called through a stand-in, first on PATH, which notes what it is given. When
the block has run, this process checks that: it composes the trainer's job, has the doctor look at a
job of a dry run, has commands take their options, and looks for extras and marks. The end-to-end
tests run the commands themselves.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from unittest import mock

import pytest
from ray.scripts.scripts import cli as ray_cli
from typer.testing import CliRunner
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.record.test_step_file import made_step
from tests.support.pages import (
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    commands_of,
    own_recipe_text,
    read,
)
from tests.support.run_folder import write_run
from verl_padding.cli import demo
from verl_padding.cli.app import app
from verl_padding.job.composition import MAIN, JobArguments, compose_job
from verl_padding.plan import STRATEGIES
from verl_padding.record.step_file import write_steps

READ = [*PAGES, *sorted(ROOT.glob("recipes/*/*.md"))]
(OVERRIDES,) = [code for code in commands_of(read(DOCS / "your_job.md")) if "overrides=(" in code]
"""The job of docs/your_job.md, in the array that other pages take for the reader's own."""
RUNS = ["demo_out", "runs/stock", "runs/padded", "runs/mine", "outputs/stock", "outputs/unshared"]
RUNS += [f"outputs/{recipe}_tiny" for recipe in ("subagents", "every_call", "guess")]
NAMES = ("python", "bash", "pip", "pytest", "verl-padding", "ray", "scontrol", "srun")
STAND_IN = f"""#!{sys.executable} -IS
import json, os, sys
name, arguments = os.path.basename(sys.argv[0]), [each for each in sys.argv[1:] if each != "..."]
module = arguments[1] if arguments[:1] == ["-m"] else ""
if name == "bash":
    os.execv("/bin/bash", ["bash", "-n", arguments[0]])
elif name == "scontrol":
    assert arguments == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    print("node1", "node2", sep=chr(10))
elif name == "srun":
    os.execvp(arguments[0], arguments)
elif name == "python" and not module.startswith(({MAIN!r}, "benchmarks", "tests")):
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
elif name == "verl-padding" and "VERL_USE_EXTERNAL_MODULES" in os.environ:
    os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "verl_padding", *arguments])
else:
    with open(os.environ["CALLS"], "a") as file:
        print(json.dumps([name, *arguments]), file=file)
    if arguments[:1] == ["symmetric-run"]:
        behind = arguments[arguments.index("--") + 1 :]
        os.execvp(behind[0], behind)
"""


def blocks(language: str) -> dict[str, str]:
    """Code -> a page that has it."""
    own_recipe = own_recipe_text()  # which test_own_recipe.py runs in order, in its own folder
    return {
        match["code"]: page.relative_to(ROOT).as_posix()
        for page in READ
        for match in FENCE.finditer(read(page).replace(own_recipe, ""))
        if match["language"] == language
    }


BASH_BLOCKS, PYTHON_BLOCKS = blocks("bash"), blocks("python")
assert len(BASH_BLOCKS) > 15
assert len(PYTHON_BLOCKS) >= 2


@pytest.fixture(scope="module")
def checkout(own_recipe, tmp_path_factory) -> Path:
    """A folder with what a checkout has, two runs to compare, a trainer of one's own, and a job of
    one's own."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(own_recipe, folder, dirs_exist_ok=True)
    for run in RUNS:
        write_run(folder / run, padded="stock" not in run)
    for path in ROOT.glob("[!.]*"):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    for steps in ("steps", "demo_out/steps"):
        write_steps([made_step()], folder / steps / "3.jsonl")
    for environment in ("environment", "vllm_environment"):
        (folder / environment / "bin").mkdir(parents=True)
        (folder / environment / "bin/activate").touch()
    (folder / "my_package").mkdir()
    (trainer,) = [code for code in PYTHON_BLOCKS if "my_trainer" in code]
    (folder / "my_package/my_trainer.py").write_text(trainer)
    (folder / "bin").mkdir()
    for name in NAMES:
        (folder / "bin" / name).write_text(STAND_IN)
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "code", BASH_BLOCKS, ids=lambda code: f"{BASH_BLOCKS[code]}: {code.split()[0]}"
)
def test_a_block_of_commands_runs(code, checkout, tmp_path, monkeypatch):
    noted = tmp_path / "calls"
    environment = os.environ | {
        "PATH": f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout}:{ROOT}",
        "CALLS": str(noted),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    command = ["/bin/bash", "-euo", "pipefail", "-c", f"{OVERRIDES}\n{code}"]
    result = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    calls = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    assert any(MAIN in call for call in calls) == ("main_ppo" in code)
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(checkout)
    monkeypatch.setattr(demo, "run_demo", lambda **options: 0)
    for call in calls:
        check_call(*call)


def check_call(program: str, *arguments: str) -> None:
    match program, *arguments:
        case "python", "-m", module, *rest if module == MAIN:
            assert compose_job(JobArguments(overrides=tuple(rest))).padding.strategy in STRATEGIES
        case "pip", "install", *rest:
            setup = ConfigParser()
            setup.read(ROOT / "setup.cfg")
            for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
                assert {*extras.split(",")} <= {*setup["options.extras_require"]}
        case "pytest", "-m", mark:
            assert f'"{mark}: ' in (ROOT / "pyproject.toml").read_text()
        case "ray", name, *options:
            behind = options.index("--") if "--" in options else None
            ray_cli.commands[name].make_context(name, options[:behind])
        case "verl-padding", name, *rest:
            answer = CliRunner().invoke(app, ["doctor" if name == "dry-run" else name, *rest])
            assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    "code", PYTHON_BLOCKS, ids=lambda code: f"{PYTHON_BLOCKS[code]}: {code.splitlines()[0]}"
)
def test_a_block_of_python_runs(code):
    import verl_padding.driver.trainers  # noqa: F401  (what the block waits for is there)

    with mock.patch.dict(TRAINER_REGISTRY):
        exec(compile(code, PYTHON_BLOCKS[code], "exec"), {})
        assert ("my_trainer" in TRAINER_REGISTRY) == ("register_trainer" in code)
