"""Whatever ends a job, no process of it is left; and no other process is touched."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_padding.on_cpu.launch import LOG, TIMED_OUT, job_environment, run_command

# A job that does what Ray does: daemons in sessions of their own, orphaned at once. They write
# their process ids to a file in the working directory.
JOB = """
import os, signal, subprocess, sys, time
def spawn(code):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with open("pids", "a") as file:
        file.write(f"{child.pid}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        spawn("import time; time.sleep(600)")
        os._exit(0)
    os._exit(0)
os.wait()
spawn("import time; time.sleep(600)")
while sum(1 for _ in open("pids")) < 2:
    time.sleep(0.01)
print("spawned", os.environ["TMPDIR"], flush=True)
"""
STUBBORN = (
    'spawn("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)");'
    " time.sleep(1)"
)
"""One more, that does not listen to SIGTERM."""


@pytest.fixture(autouse=True)
def _bystander():
    """A process of ours, with the same command line as those of the job, that must survive."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield
    assert process.poll() is None
    process.kill()
    process.wait()


def assert_all_gone(folder):
    assert not left_of_job(folder)
    scratch = (folder / LOG).read_text().split("spawned ")[1].split()[0]
    assert not Path(scratch).exists()


def left_of_job(folder):
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) >= 2
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("end", "code"),
    [(f"{STUBBORN}; sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_a_job_that_ends_takes_its_daemons_with_it(tmp_path, end, code):
    lines: list[str] = []
    command = [sys.executable, "-c", f"{JOB}\n{end}"]
    assert run_command(command, folder=tmp_path / "job", on_line=lines.append) == code
    assert len(lines) == 1
    assert_all_gone(tmp_path / "job")


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    command = [sys.executable, "-c", f"{JOB}\ntime.sleep(600)"]
    assert run_command(command, folder=tmp_path, timeout_s=5) == TIMED_OUT
    assert_all_gone(tmp_path)


LAUNCHER = f"""
import signal, sys
from pathlib import Path
from verl_padding.on_cpu.launch import run_command
# A shell that starts tests in the background has them ignore SIGINT, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_command([sys.executable, "-c", {JOB!r} + "time.sleep(600)"], folder=Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_job_ends_with_the_process_that_started_it(tmp_path, number):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / LOG).exists() or "spawned" not in (tmp_path / LOG).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    launcher.send_signal(number)
    launcher.wait(timeout=60)

    while left_of_job(tmp_path):  # a killed launcher cannot wait for the supervisor
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_joins_no_cluster_and_keeps_the_rest_of_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MY_OWN", "kept")
    environment = job_environment(Path("/tmp/scratch"), Path("/tmp/folder"))
    assert environment["MY_OWN"] == "kept"
    assert not {"RAY_ADDRESS", "RANK"} & environment.keys()
