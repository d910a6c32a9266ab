"""Starts a verl job on this machine's CPU and leaves no process of it behind."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_padding.local.job_supervisor import GRACE_S
from verl_padding.runs.report import LOG, METRICS

# Names of the caller's environment that would make the job join someone else's cluster or process group.
_DROPPED = {
    "RAY_ADDRESS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def run_local_job(
    overrides: Sequence[str],
    *,
    folder: Path,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    local: str = "cpu",
) -> int:
    """Runs verl's trainer with ``+local=cpu`` and `overrides`, in `folder`, to its end.

    Whatever ends the call (the job's own end, an exception of `on_line`, Ctrl-C, a signal that kills this
    process), all processes of the job are ended and its temporary files removed. Other jobs and other Ray
    clusters of the machine are not touched.

    Args:
        overrides: Hydra overrides.
        folder: the job's working directory, made if missing. Its output is added to ``log``, its metrics go to
            ``metrics.jsonl`` there, one line per step.
        on_line: is called with each line of the output, without the newline.
        timeout_s: seconds until the job is ended.
        local: the choice of the config group ``local``: ``cpu``, or ``cpu_vllm`` for vLLM as the rollout.

    Returns: the exit code of the trainer; 128 + n if signal n ended it.

    Raises:
        TimeoutError: the job took longer than `timeout_s`.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"+local={local}", *overrides]
    return run_command(command, folder=folder, on_line=on_line, timeout_s=timeout_s)


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    cwd: Path | None = None,
) -> int:
    """Runs any command with the environment and the guarantees of `run_local_job`, in `cwd` instead if it is given."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    timed_out = threading.Event()
    with contextlib.ExitStack() as at_the_end:
        # Ray puts Unix sockets below it, whose paths must stay under 107 characters, and TMPDIR may be long.
        scratch = tempfile.mkdtemp(prefix="verl-", dir="/tmp" if os.path.isdir("/tmp") else None)
        at_the_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "verl_padding.local.job_supervisor", str(os.getpid()), scratch, *command],
            cwd=cwd or folder,
            env=job_environment(Path(scratch), folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must reach us, not the job: we end it in order
        )
        at_the_end.callback(_end, supervisor)
        if timeout_s is not None:

            def end_late_job() -> None:
                timed_out.set()
                supervisor.terminate()

            timer = threading.Timer(timeout_s, end_late_job)
            at_the_end.callback(timer.cancel)
            timer.start()
        assert supervisor.stdout is not None
        with open(folder / LOG, "a", encoding="utf-8", buffering=1) as log:
            for line in supervisor.stdout:
                log.write(line)
                if on_line is not None:
                    on_line(line.rstrip("\n"))
        code = supervisor.wait()
    if timed_out.is_set():
        raise TimeoutError(f"the job was ended after {timeout_s} s; its output is in {folder / LOG}")
    return code


def job_environment(scratch: Path, folder: Path) -> dict[str, str]:
    """The caller's environment, changed for a job whose temporary files go to `scratch`."""
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    # Otherwise Ray writes one into the home folder, and of two first jobs that start at once, one takes the other's.
    environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return environment | {
        "VERL_PLATFORM": "cpu",
        # With INFO on, a broken call to logger.info ends separate_async jobs without hybrid replicas.
        "VERL_LOGGING_LEVEL": "WARN",
        "VERL_FILE_LOGGER_PATH": str(folder / METRICS),
        # A job has about ten processes: more threads each would only fight for the cores.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Otherwise Ray starts a worker for each of its many logical CPUs.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _end(supervisor: subprocess.Popen[str]) -> None:
    """Has the supervisor clear up, and waits until it has."""
    if supervisor.poll() is None:
        supervisor.terminate()
    while True:
        # A second Ctrl-C does not help: leaving now would leave the job's processes.
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            supervisor.wait(timeout=GRACE_S)
            break
    if supervisor.stdout is not None:
        supervisor.stdout.close()
