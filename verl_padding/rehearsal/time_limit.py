"""Ends this process where the user's code hangs, and shows where it does."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_padding.rehearsal.failure import Failure, Frame, RehearsalError, frames_of

GRACE_S = 5
"""Seconds after the time limit in which a process ends itself in words."""


@contextmanager
def time_limit(timeout_s: float, show: Callable[[RehearsalError], object]) -> Iterator[None]:
    """Ends the process after this time, once the error has been shown."""

    def end() -> None:
        hung = Failure("Timeout", f"still running after {timeout_s:.0f} s", list(_frames_now()))
        show(RehearsalError("the job's own code does not end", stage="sessions", failures=[hung]))
        if not hung.own:
            faulthandler.dump_traceback(file=sys.stderr)
        sys.stdout.flush()
        os._exit(1)  # a thread that hangs would keep the process

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    # Code that never gives the interpreter's lock away, such as a regular expression, stops the timer, too.
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=2)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _frames_now() -> Iterator[Frame]:
    """Frames of all threads, and of all tasks that wait, the user's own among them."""
    for top in sys._current_frames().values():
        yield from frames_of(traceback.walk_stack(top))
    for task in [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()]:
        waiting: Any = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            yield from frames_of([(frame, frame.f_lineno)])
            waiting = waiting.cr_await
