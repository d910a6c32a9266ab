"""Runs one command and ends every process that it has led to: ``python -m verl_padding.local.job_supervisor``.

Ray's daemons and workers leave their parent's process group and outlive it. On Linux the supervisor is a "subreaper":
an orphan below it becomes its child instead of init's, so the tree below it holds every process of the job and no
other. The kernel sends it a SIGTERM when its own parent ends. Elsewhere only attached processes are found.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

import psutil

GRACE_S = 5.0
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Stopped(BaseException):
    """A signal asked the supervisor to end the job."""


def supervise(command: list[str], *, parent: int, scratch: str, timeout_s: float) -> int:
    """Runs `command` to its end, or until a signal or the timeout (0 for none), and deletes the folder `scratch` then.

    Nothing is started if the process `parent` is gone already. Returns the command's exit code; 128 + n if signal n
    (SIGALRM after the timeout) ended the command or the supervisor.
    """
    for number in _STOPPING:
        signal.signal(number, _stop)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        if sys.platform == "linux":
            prctl = ctypes.CDLL(None, use_errno=True).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            return 128 + signal.SIGTERM  # ended before the kernel watched it
        return _wait_for(subprocess.Popen(command).pid)
    except _Stopped as stopped:
        return 128 + int(stopped.args[0])
    finally:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)  # nothing may interrupt the clearing up
        end_descendants(GRACE_S)
        shutil.rmtree(scratch, ignore_errors=True)


def end_descendants(grace_s: float) -> None:
    """Ends all processes below this one: SIGTERM, and after `grace_s` seconds SIGKILL, until none is left."""
    end, timeout_s = psutil.Process.terminate, grace_s
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(processes, timeout=timeout_s)  # which also reaps the orphans that became our children
        end, timeout_s = psutil.Process.kill, 0.1


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped(number)


def _wait_for(child: int) -> int:
    """Waits for `child` and reaps the orphans that end before it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    parent, scratch, timeout_s, *command = sys.argv[1:]
    sys.exit(supervise(command, parent=int(parent), scratch=scratch, timeout_s=float(timeout_s)))
