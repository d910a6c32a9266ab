"""The Python of tests that starts at once is one: arguments, environment, folder, streams and ends are its own."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.forked_python import IMPORTED, NOT_BEFORE, forked_python

SHOW = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.environ.get("OF_A_TEST"), os.getcwd(), sys.stdin.read(), os.nice(0)]))
print("also heard", file=sys.stderr)
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
            check=True,
        )
        return [*json.loads(ended.stdout), ended.stderr]

    assert answers(shlex.split(forked_python())) == answers([sys.executable])


def test_a_copy_has_imported_what_takes_long_and_nothing_that_a_test_asks_about():
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([*shlex.split(forked_python()), "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(ended.stdout))
    assert set(IMPORTED) <= modules
    assert not (NOT_BEFORE | {"tests"}) & modules


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_copy_ends_as_python_does(code: str, expected: int):
    for python in (shlex.split(forked_python()), [sys.executable]):
        assert subprocess.run([*python, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_copy_ends_with_who_has_asked_for_it(number: signal.Signals):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen([*shlex.split(forked_python()), "-c", code], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        copy = psutil.Process(int(asks.stdout.readline()))
        assert copy.pid != asks.pid
        asks.send_signal(number)
        assert asks.wait(timeout=30) == -number
        assert not psutil.wait_procs([copy], timeout=30)[1]
