"""Runs one command and ends every process that it has led to: ``python -m
verl_padding.on_cpu.job_supervisor``.

Ray's daemons and workers outlive their parent. On Linux the supervisor is a "subreaper": an orphan
below it becomes its child instead of init's, so the tree below it is the whole job and no more.
Elsewhere only attached processes are found.
"""

import contextlib
import ctypes
import shutil
import subprocess
import sys
import threading

import psutil

GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def supervise(command: list[str], *, scratch: str) -> int:
    """Runs `command` until it ends or standard input is closed; deletes `scratch`.

    Returns its exit code; 128 + n if signal n ended it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    code = job.wait()
    end_descendants()
    shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end_with_launcher() -> None:
    sys.stdin.read()  # until the launcher closes its end of the pipe, or is gone itself
    end_descendants()


def end_descendants() -> None:
    """Ends all processes below this one: SIGTERM, and after a grace period SIGKILL, until none is
    left."""
    # In rounds: a process may start another one while its parent is ended.
    end, timeout_s = psutil.Process.terminate, GRACE_S
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(
            processes, timeout=timeout_s
        )  # which also reaps the orphans that became our children
        end, timeout_s = psutil.Process.kill, 0.1


if __name__ == "__main__":
    scratch, *command = sys.argv[1:]
    sys.exit(supervise(command, scratch=scratch))
