"""Each code block of README, docs and recipes, run by bash or Python as it stands, in a folder laid out as a checkout.

What takes minutes is met by stand-ins, found first on PATH, that check as much as can be checked at once: the demo
takes its options, a run script is read by bash, an environment gets the same stand-ins, an installation has its extras
looked up, tests and benchmarks have their files. What verl's trainer, the doctor and Ray's commands are given is
written down, and when the block has run, this process composes the job, has the doctor look at it, or has the command
take its options: starting each would take seconds. The end-to-end tests run the commands themselves.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from ray.scripts.scripts import cli as ray_cli
from typer.testing import CliRunner
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.support.pages import DOCS, FENCE, PAGES, ROOT, commands_of, read, skip_without_the_extra_docs
from tests.support.run_folder import write_run
from tests.timing.test_laps import two_ranks
from verl_padding.cli.app import app
from verl_padding.job.composition import MAIN, JobArguments, compose_job
from verl_padding.plan import STRATEGIES
from verl_padding.timing.laps import TimedStep, write_step

OWN_RECIPE, FIRST_HOUR = DOCS / "own_recipe.md", DOCS / "first_hour.md"
RUN_AS_A_WHOLE = {OWN_RECIPE}
"""Pages whose blocks are run in order, in a folder of their own, by ``test_own_recipe.py``."""
READ = [*(page for page in PAGES if page not in RUN_AS_A_WHOLE), *sorted(ROOT.glob("recipes/*/*.md"))]
(OVERRIDES,) = [code for code in commands_of(FIRST_HOUR) if "overrides=(" in code]
"""The first hour's job, in the array that other pages take for the reader's own."""

CALLS = "calls"
"""File with what trainer, doctor and Ray were given: a zero byte ends each argument, and another one each call."""
PYTHON = f"""#!/bin/bash
arguments=()
for argument in "$@"; do [[ $argument == ... ]] || arguments+=("$argument"); done
case "${{arguments[*]}}" in
"-m verl.trainer.main_ppo"*) printf '%s\\0' "${{arguments[@]:1}}" "" >> "$CALLS" ;;
"-m benchmarks."* | "-m tests."*)
    exec {sys.executable} -c "import importlib.util as i, sys; sys.exit(i.find_spec('${{arguments[1]}}') is None)" ;;
"-m venv "*) mkdir -p "${{arguments[2]}}/bin" && cp "${{0%/*}}"/{{python,pip,pytest}} "${{arguments[2]}}/bin" ;;
*) exec {sys.executable} "${{arguments[@]}}" ;;
esac
"""

BASH = """#!/bin/bash
exec /bin/bash -n "$1"
"""

PIP = f"""#!{sys.executable}
import configparser, re, sys
parser = configparser.ConfigParser()
parser.read({str(ROOT / "setup.cfg")!r})
assert sys.argv[1] == "install", sys.argv
for extras in re.findall(r"\\[(.*?)\\]", " ".join(sys.argv)):
    for extra in extras.split(","):
        assert extra in parser["options.extras_require"], extra
"""

PYTEST = f"""#!{sys.executable}
import sys
from pathlib import Path
arguments = sys.argv[1:]
if "-m" in arguments:
    place = arguments.index("-m")
    _, marker = arguments[place], arguments[place + 1]
    for name in set(marker.split()) - {{"or", "and", "not"}}:
        assert f'"{{name}}: ' in Path({str(ROOT / "pyproject.toml")!r}).read_text(), marker
    del arguments[place : place + 2]
for argument in arguments:
    assert (Path({str(ROOT)!r}) / argument.split("::")[0]).exists(), argument
"""

VERL_PADDING = f"""#!/bin/bash
# A module of the reader's own is imported in a process of its own. What a rehearsal is given, the doctor takes too.
[[ $1 == rehearse ]] && set -- doctor "${{@:2}}"
if [[ $1 == doctor && -z ${{VERL_USE_EXTERNAL_MODULES-}} ]]; then
    printf '%s\\0' "$@" "" >> "$CALLS"
else
    exec {sys.executable} "${{0%/*}}/verl_padding_without_demo.py" "$@"
fi
"""

WITHOUT_DEMO = """
import verl_padding.cli.demo
from verl_padding.cli.app import app
verl_padding.cli.demo.run_demo = lambda **options: 0
app()
"""

RAY = """#!/bin/bash
printf '%s\\0' ray "$@" "" >> "$CALLS"
if [[ $1 == symmetric-run ]]; then
    while [[ $1 != -- ]]; do shift; done
    exec "${@:2}"
fi
"""

SCONTROL = """#!/bin/bash
[[ $1 == show && $2 == hostnames && $3 == "$SLURM_JOB_NODELIST" ]] && printf 'node1\\nnode2\\n'
"""

SRUN = """#!/bin/bash
[[ $1 == -* ]] && exit 1
exec "$@"
"""

STAND_INS = {"python": PYTHON, "bash": BASH, "pip": PIP, "pytest": PYTEST, "verl-padding": VERL_PADDING}
STAND_INS |= {"verl_padding_without_demo.py": WITHOUT_DEMO, "ray": RAY, "scontrol": SCONTROL, "srun": SRUN}


def blocks(language: str) -> dict[str, str]:
    """Code -> the first page that has it."""
    found: dict[str, str] = {}
    for page in READ:
        for match in FENCE.finditer(read(page)):
            if match["language"] == language:
                found.setdefault(match["code"], page.relative_to(ROOT).as_posix())
    return found


BASH_BLOCKS, PYTHON_BLOCKS = blocks("bash"), blocks("python")


def test_there_are_blocks_and_each_is_of_a_language_that_is_run():
    assert len(BASH_BLOCKS) > 15
    assert len(PYTHON_BLOCKS) >= 2
    others = {
        match["language"]
        for page in READ
        for match in FENCE.finditer(read(page))
        if not match["language"].startswith("{")
    } - {"bash", "python"}
    assert others <= {"text"}, "say here how it is run"


@pytest.fixture(scope="module")
def checkout(own_recipe, tmp_path_factory) -> Path:
    """A folder with what a checkout has, two runs to compare, a trainer of one's own, and the first hour's job."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in own_recipe.iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("benchmarks", "recipes", "tests", "docs", "configs", "verl_padding", "setup.cfg", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for run, padded in (("runs/stock", False), ("runs/padded", True), ("outputs/stock", False)):
        write_run(folder / run, padded=padded)
    for run in ("subagents_tiny", "every_call_tiny", "unshared"):
        write_run(folder / "outputs" / run, padded=True)
    write_step([TimedStep(step=3, keys=["a_0_0", "a_0_1"], laps=two_ranks())], folder / "timing/3.jsonl")
    for environment in ("environment", "vllm_environment"):
        (folder / environment / "bin").mkdir(parents=True)
        (folder / environment / "bin/activate").touch()
    (folder / "my_package").mkdir()
    (trainer,) = [code for code in PYTHON_BLOCKS if "my_trainer" in code]
    (folder / "my_package/my_trainer.py").write_text(trainer)
    (folder / "bin").mkdir()
    for name, script in STAND_INS.items():
        path = folder / "bin" / name
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.docs if "sphinx-build" in code else ()) for code in BASH_BLOCKS],
    ids=lambda code: f"{BASH_BLOCKS[code]}: {code.split()[0]}",
)
def test_a_block_of_commands_runs(code, checkout, monkeypatch):
    if "sphinx-build" in code:
        skip_without_the_extra_docs()
    environment = os.environ | {
        "PATH": f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout}:{ROOT}",
        "CALLS": str(checkout / CALLS),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    result = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{OVERRIDES}\n{code}"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    calls = calls_of(checkout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (MAIN in [call[0] for call in calls]) == ("main_ppo" in code)
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(checkout)
    for program, *arguments in calls:
        if program == MAIN:
            given = get_args_parser().parse_args(arguments)
            options = {name: getattr(given, name) for name in ("config_dir", "config_name", "config_path")}
            named = {name: value for name, value in options.items() if value is not None}
            assert compose_job(JobArguments(overrides=tuple(given.overrides), **named)).padding.strategy in STRATEGIES
        elif program == "ray":
            name, *options = arguments[: arguments.index("--") if "--" in arguments else None]
            ray_cli.commands[name].make_context(name, options)
        else:
            answer = CliRunner().invoke(app, [program, *arguments])
            assert answer.exit_code == 0, answer.output


def calls_of(checkout: Path) -> list[list[str]]:
    """Arguments of each call of the trainer, the module first, of the doctor, and of Ray; they are forgotten."""
    file = checkout / CALLS
    text = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return [call.split("\0") for call in text.split("\0\0")[:-1]]


@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=lambda code: f"{PYTHON_BLOCKS[code]}: {code.splitlines()[0]}")
def test_a_block_of_python_runs(code):
    import verl_padding.driver.trainers  # noqa: F401  (what the block waits for is there)

    before = dict(TRAINER_REGISTRY)
    exec(compile(code, PYTHON_BLOCKS[code], "exec"), {})
    new = TRAINER_REGISTRY.keys() - before.keys()
    assert new == ({"my_trainer"} if "register_trainer" in code else set())
    for name in new:
        del TRAINER_REGISTRY[name]
