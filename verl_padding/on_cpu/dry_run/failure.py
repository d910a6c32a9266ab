"""What ended a dry run: the first real exception, the user's own line first, and what it comes
from."""

import asyncio
import faulthandler
import gc
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from verl_padding.errors import PaddingError

MAX_SHOWN = 400  # characters of an exception's message, or of a job's last words, that are shown
SESSION_FAILED = "Error in _run_prompt"
"""What verl logs of a session that has failed, before the exception; it goes on without the
session."""
REFUSED = "verl_padding: "
"""How the last line of a job begins that the plug-in has refused."""
GRACE_S = 5  # seconds after the time limit in which a process ends itself in words
PACKAGE = str(Path(__file__).parents[2]) + "/"
LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "<string>",
    sysconfig.get_paths()["stdlib"],
    PACKAGE,
)
"""Parts of the names of all files but the user's own."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own code, and not a library's, verl's or the plug-in's."""
        return not any(part in self.file for part in LIBRARIES)

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.name}: {text}"


@dataclass
class Failure:
    """One kind of exception, however often it was raised."""

    kind: str
    message: str
    frames: list[Frame] = field(default_factory=list)
    process: str = ""
    count: int = 1

    @property
    def own(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.is_own]

    @property
    def key(self) -> tuple[object, ...]:
        """Of failures that are of one kind."""
        last = (self.own or self.frames)[-1:]
        return (
            self.kind,
            *((frame.file, frame.line) for frame in last),
            "" if last else self.message[:60],
        )

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The innermost cause: verl, Hydra and Ray wrap it. What the user's own code handled when
        it raised is none."""
        frames = _frames(traceback.walk_tb(error.__traceback__))
        while True:
            handled = error.__suppress_context__ or (frames and frames[-1].is_own)
            cause = error.__cause__ or (None if handled else error.__context__)
            if cause is None:
                break
            error, frames = cause, _frames(traceback.walk_tb(cause.__traceback__))
        if isinstance(error, SyntaxError) and error.filename:
            frames.append(Frame(error.filename, error.lineno or 0, "the file"))
        return cls(type(error).__name__, " ".join(str(error).split()), frames)

    def lines(self, files: Mapping[str, str]) -> Iterator[str]:
        """At most ten; `files` has the setting that names each of the user's files."""
        yield shortened(f"{self.kind}: {self.message}")
        for frame in self.own[-4:][::-1]:
            yield f"  {frame}"
        if self.frames and not self.frames[-1].is_own:
            yield f"  raised in {self.frames[-1]}"
        if settings := dict.fromkeys(
            files[frame.file] for frame in self.own if frame.file in files
        ):
            yield f"  set by {', '.join(settings)}"
        if self.count > 1 or self.process:
            yield f"  {self.count} times" + (f", in {self.process}" if self.process else "")


def shortened(text: str) -> str:
    """A text in one line, without the middle of a long one."""
    text = " ".join(text.split())
    return (
        text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} .. {text[-MAX_SHOWN // 2 :]}"
    )


def count_failure(failure: Failure, found: dict[tuple[object, ...], Failure]) -> None:
    """Adds a failure to those of a kind, by their key."""
    known = found.setdefault(failure.key, failure)
    known.count += known is not failure


def _frames(walked: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    return [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


class DryRunError(PaddingError):
    """A dry run has ended: what went wrong, what the job was doing, and the exceptions that were
    seen, in order."""

    def __init__(self, message: str, *, stage: str, failures: Iterable[Failure] = ()):
        super().__init__(message)
        self.stage = stage
        self.failures = list(failures)


ANSI = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^\((?P<process>(?!pid=)[\w.:]+)?(?: ?pid=(?P<pid>\d+))[^)]*\) ?")
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
WRAPPERS = ("ray.exceptions.", "RayTaskError", "ray.")


class FailuresOfLog:
    """What went wrong by the output of a job's processes, read line by line; Ray's own wrappers are
    left out.

    Attributes:
        failed_sessions: how many sessions verl has gone on without.
        refusal: why the plug-in has refused the job; empty if it has not.
    """

    def __init__(self) -> None:
        self.failed_sessions = 0
        self.refusal = ""
        self._found: dict[tuple[object, ...], Failure] = {}
        self._open: dict[str, Failure] = {}

    def read(self, line: str) -> None:
        line = ANSI.sub("", line.rstrip("\n"))
        process, text = "the trainer", line
        if of_ray := PREFIX.match(line):
            process, text = of_ray["process"] or f"process {of_ray['pid']}", line[of_ray.end() :]
        self.failed_sessions += SESSION_FAILED in text
        if text.startswith(REFUSED):
            self.refusal = text.removeprefix(REFUSED)
        if "Traceback (most recent call last)" in text or text.startswith("ray::"):
            self._open[process] = Failure("", "", process=process)
        elif failure := self._open.get(process):
            if frame := FRAME.match(text):
                failure.frames.append(Frame(frame["file"], int(frame["line"]), frame["name"] or ""))
            elif raised := RAISED.match(text):
                failure.kind, failure.message = (
                    raised["kind"].rpartition(".")[2],
                    raised["message"] or "",
                )
                del self._open[process]
                if failure.frames and not raised["kind"].startswith(WRAPPERS):
                    count_failure(failure, self._found)

    def failures(self) -> list[Failure]:
        """Those with a line of the user's own first, then in the order in which they were
        raised."""
        return sorted(self._found.values(), key=lambda failure: not failure.own)


@contextmanager
def time_limit(timeout_s: float, show: Callable[[DryRunError], object]) -> Iterator[None]:
    """Ends this process after this time, where the user's code hangs, once the error with its line
    has been shown."""

    def end() -> None:
        hung = Failure("Timeout", f"still running after {timeout_s:.0f} s", list(_running_frames()))
        show(DryRunError("the job's own code does not end", stage="sessions", failures=[hung]))
        sys.stdout.flush()
        os._exit(1)  # a thread that hangs would keep the process

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    # Code that never gives the interpreter's lock away, such as a regular expression, stops the
    # timer, too.
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=2)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _running_frames() -> Iterator[Frame]:
    """Frames of all threads, and of all tasks that wait, the user's own among them."""
    for top in sys._current_frames().values():
        yield from _frames(traceback.walk_stack(top))
    for task in [
        each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()
    ]:
        waiting: Any = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            yield from _frames([(frame, frame.f_lineno)])
            waiting = waiting.cr_await
