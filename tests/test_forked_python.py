"""The Python of tests that starts at once is one: arguments, environment, folder, streams and ends are its own."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.forked_python import NOT_BEFORE, forked_python

SHOW = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.environ.get("OF_A_TEST"), os.getcwd(), sys.stdin.read(), os.nice(0)]))
print("also heard", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_copy_runs_what_python_would(how: str, tmp_path: Path):
    script = tmp_path / "shows.py"
    script.write_text(SHOW)
    arguments = {"script": [str(script)], "-m": ["-m", "shows"], "-c": ["-c", SHOW]}[how]

    def answers(python: list[str]) -> list[str]:
        ended = subprocess.run(
            ["nice", "-n", "3", *python, *arguments, "one", "two words"],
            cwd=tmp_path,
            env={**os.environ, "OF_A_TEST": how, "PYTHONPATH": ""},
            input="asked",
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 3
        return [*json.loads(ended.stdout), ended.stderr]

    assert answers(shlex.split(forked_python())) == answers([sys.executable])


def test_a_copy_has_imported_nothing_that_a_test_asks_about():
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([*shlex.split(forked_python()), "-c", code], capture_output=True, text=True, check=True)
    assert not (NOT_BEFORE | {"tests"}) & set(json.loads(ended.stdout))


def test_a_copy_ends_with_who_has_asked_for_it():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen([*shlex.split(forked_python()), "-c", code], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        copy = psutil.Process(int(asks.stdout.readline()))
        assert copy.pid != asks.pid
        asks.kill()
        assert not psutil.wait_procs([copy], timeout=30)[1]
