"""Whatever ends a job, no process of it is left; and no other process is touched."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_padding.local.launch import LOG, job_environment, run_command

# A job that does what Ray does: daemons in sessions of their own, orphaned at once. They write their process ids to a
# file in the working directory.
JOB = """
import os, signal, subprocess, sys, time
code = "import signal, time; {}; time.sleep(600)"
def spawn(body):
    child = subprocess.Popen([sys.executable, "-c", code.format(body)], start_new_session=True)
    with open("pids", "a") as file:
        file.write(f"{child.pid}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        spawn("pass")
        spawn("pass")
        os._exit(0)
    os._exit(0)
os.wait()
spawn("pass")
while sum(1 for _ in open("pids")) < 3:
    time.sleep(0.01)
print("spawned", os.environ["TMPDIR"], flush=True)
"""
# One of its daemons will not listen to SIGTERM, and is killed after a grace period.
STUBBORN_JOB = JOB.replace('spawn("pass")', 'spawn("signal.signal(signal.SIGTERM, signal.SIG_IGN)")', 1)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours, with the same command line as those of the job, that must survive."""
    process = subprocess.Popen([sys.executable, "-c", "import signal, time; pass; time.sleep(600)"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


def assert_all_gone(folder: Path) -> None:
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    scratch = (folder / LOG).read_text().split("spawned ")[1].split()[0]
    assert not Path(scratch).exists()


@pytest.mark.parametrize(
    ("job", "end", "code"),
    [(JOB, "sys.exit(0)", 0), (STUBBORN_JOB, "sys.exit(3)", 3), (JOB, "os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
@pytest.mark.usefixtures("bystander")
def test_a_job_that_ends_takes_its_daemons_with_it(tmp_path: Path, job: str, end: str, code: int) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", f"{job}\n{end}"]
    assert run_command(command, folder=tmp_path / "job", on_line=lines.append) == code
    assert len(lines) == 1
    assert_all_gone(tmp_path / "job")


@pytest.mark.usefixtures("bystander")
def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="log"):
        run_command([sys.executable, "-c", f"{JOB}\ntime.sleep(600)"], folder=tmp_path, timeout_s=8)

    assert_all_gone(tmp_path)


@pytest.mark.usefixtures("bystander")
def test_an_exception_while_reading_ends_the_job(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", f"{JOB}\ntime.sleep(600)"], folder=tmp_path, on_line=interrupt)

    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("job", "number"), [(JOB, signal.SIGINT), (JOB, signal.SIGTERM), (STUBBORN_JOB, signal.SIGKILL)]
)
@pytest.mark.usefixtures("bystander")
def test_the_job_ends_with_the_process_that_started_it(tmp_path: Path, job: str, number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # A shell that starts tests in the background has them ignore SIGINT, and so would this process.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "import sys; from pathlib import Path; from verl_padding.local.launch import run_command; "
            "run_command([sys.executable, '-c', sys.argv[1]], folder=Path(sys.argv[2]))",
            f"{job}\ntime.sleep(600)",
            str(tmp_path),
        ],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while "spawned" not in (_read(tmp_path / LOG)):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    launcher.send_signal(number)
    launcher.wait(timeout=60)

    # a killed launcher cannot wait for the supervisor, which needs its grace period
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(int(line)) for line in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_does_not_join_the_callers_cluster_and_keeps_the_rest_of_its_environment(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MY_OWN", "kept")
    environment = job_environment(Path("/tmp/scratch"), Path("/tmp/folder"))
    assert environment["MY_OWN"] == "kept"
    assert not {"RAY_ADDRESS", "RANK"} & environment.keys()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
