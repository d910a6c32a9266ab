"""Starts a verl job on this machine's CPU and leaves no process of it behind."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_padding.on_cpu import job_supervisor
from verl_padding.record.run_files import LOG, METRICS

# Names of the caller's environment that would make the job join someone else's cluster or process
# group.
_DROPPED = {
    "RAY_ADDRESS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
TIMED_OUT = 128 + signal.SIGALRM


def run_local_job(overrides: Sequence[str], *, local: str = "cpu", **options: Any) -> int:
    """Runs verl's trainer with ``+local=cpu``, or ``cpu_vllm``, by :func:`run_command`."""
    return run_command(
        [sys.executable, "-m", "verl.trainer.main_ppo", f"+local={local}", *overrides], **options
    )


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    on_line: Callable[[str], object] = lambda _: None,
    timeout_s: float | None = None,
    cwd: Path | None = None,
) -> int:
    """Runs a command that starts a job, and returns its exit code; 128 + n if signal n ended it,
    :data:`TIMED_OUT` if it took longer than ``timeout_s``.

    Whatever ends the call (the job's own end, an exception of `on_line`, Ctrl-C, a signal that
    kills this process), all processes of the job, and no others, are ended and its temporary files
    removed.

    Args:
        folder: made if missing. The output is added to ``log``, the metrics to ``metrics.jsonl``
            there, a line a step.
        on_line: is called with each line of the output, without the newline.
        cwd: the working directory; `folder` if None.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Ray puts Unix sockets below it, whose paths must stay under 107 characters, and TMPDIR may be
    # long.
    scratch = tempfile.mkdtemp(prefix="verl-", dir="/tmp" if os.path.isdir("/tmp") else None)
    supervisor = _start(command, scratch, folder, cwd or folder)
    stdin = supervisor.stdin
    assert stdin is not None
    assert supervisor.stdout is not None
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        stdin.close()

    limit = threading.Timer(timeout_s or threading.TIMEOUT_MAX, end)
    limit.start()
    try:
        with supervisor.stdout, open(folder / LOG, "a", encoding="utf-8", buffering=1) as log:
            for line in supervisor.stdout:
                log.write(line)
                on_line(line.rstrip("\n"))
        code = supervisor.wait()
    finally:
        limit.cancel()
        stdin.close()
        while supervisor.poll() is None:
            # A second Ctrl-C does not help: leaving now would leave the job's processes.
            with contextlib.suppress(KeyboardInterrupt):
                supervisor.wait()
    return TIMED_OUT if is_over.is_set() else code


def _start(command: Sequence[str], scratch: str, folder: Path, cwd: Path) -> subprocess.Popen[str]:
    """A command below a supervisor, which ends the job when its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-m", job_supervisor.__name__, scratch, *command],
        cwd=cwd,
        env=job_environment(Path(scratch), folder),
        # The supervisor ends the job when it closes: at this call's end, or if this process dies.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C must reach us, not the job: we end it in order
    )


def job_environment(scratch: Path, folder: Path) -> dict[str, str]:
    """The caller's environment, changed for a job whose temporary files go to `scratch`."""
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    # Otherwise Ray writes one into the home folder, and of two first jobs that start at once, one
    # takes the other's.
    environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return environment | {
        "VERL_PLATFORM": "cpu",
        # With INFO on, a broken call to logger.info ends separate_async jobs without hybrid
        # replicas.
        "VERL_LOGGING_LEVEL": "WARN",
        "VERL_FILE_LOGGER_PATH": str(folder / METRICS),
        # A job has about ten processes: more threads each would only fight for the cores.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Otherwise Ray starts a worker for each of its many logical CPUs.
        "RAY_prestart_worker_first_driver": "0",
    }


def seed_overrides(seed: int) -> list[str]:
    """Seeds the order of the data, the rollout (and by ``+local=cpu`` the engine), verl's own cut
    of mini-batches."""
    settings = (
        "data.seed",
        "actor_rollout_ref.rollout.seed",
        "actor_rollout_ref.actor.data_loader_seed",
    )
    return [f"{setting}={seed}" for setting in settings]
