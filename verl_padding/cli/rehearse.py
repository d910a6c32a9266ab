"""The command ``verl-padding rehearse``: runs a job small, on this machine's CPU, before it runs large."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.rehearsal.failure import Failure, Frame, RehearsalError
from verl_padding.rehearsal.own_files import own_files

Act = Literal["all", "sessions", "step"]
MOST_FAILURES = 3
"""Kinds of exceptions that are shown."""


def rehearse(
    arguments: JobArguments,
    *,
    console: Console,
    replies: Sequence[str],
    only: Act = "all",
    with_tools: bool = True,
    with_rewards: bool = True,
    timeout_s: float,
) -> int:
    """Runs both acts, and returns 1 if something is wrong, else 0.

    Args:
        arguments: of the job, as they are given to ``verl.trainer.main_ppo``.
        replies: texts that the model says in sessions, among noise and calls of tools.
        timeout_s: seconds that each act may take.
    """
    os.environ["VERL_PLATFORM"] = "cpu"
    sys.path.insert(0, os.getcwd())
    console.print("This runs the job's own code: data set, agent loops, tools and rewards, a few times each.")
    try:
        config = compose_job(arguments)
    except Exception as error:
        return _show(RehearsalError(str(error), stage="settings", failures=[Failure.of(error)]), {}, console)
    files = own_files(config)
    try:
        if only != "step":
            _sessions(config.copy(), console, files, replies, with_tools, with_rewards, timeout_s)
        if only != "sessions":
            _step(config, console, replies, timeout_s)
    except RehearsalError as failure:
        return _show(failure, files, console)
    console.print(Text("The rehearsal went well.", style="green"))
    return 0


def _sessions(
    config: DictConfig,
    console: Console,
    files: Mapping[str, str],
    replies: Sequence[str],
    with_tools: bool,
    with_rewards: bool,
    timeout_s: float,
) -> None:
    from verl_padding.rehearsal.played_rows import description, problems
    from verl_padding.rehearsal.sessions import play_sessions

    started = time.process_time()
    with _Watchdog(timeout_s, console, files), _quietly():
        played = play_sessions(config, replies=replies, with_tools=with_tools, with_rewards=with_rewards)
    _lines(console, "sessions", [*description(played), f"{time.process_time() - started:.0f} CPU seconds"])
    for message, count in played.logged.most_common():
        console.print(Text(f"  logged {count} times: {message}", style="yellow"))
    wrong = list(problems(played, config))
    if played.failures or wrong or not played.rows:
        failed = sum(failure.count for failure in played.failures.values())
        message = (
            f"{failed} sessions have failed, and verl would go on without them" if failed else "no row came of them"
        )
        raise RehearsalError("; ".join(wrong) or message, stage="sessions", failures=[*played.failures.values()])


def _step(config: DictConfig, console: Console, replies: Sequence[str], timeout_s: float) -> None:
    from verl_padding.rehearsal.step import rehearse_step

    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    try:
        with console.status("a step of the job, on this machine's CPU") as status:
            report = rehearse_step(
                config, folder=folder, timeout_s=timeout_s, replies=replies, on_stage=lambda stage: status.update(stage)
            )
        _lines(console, "step", report.lines())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lines(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(f"{title}:", style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"))


def _show(failure: RehearsalError, files: Mapping[str, str], console: Console) -> int:
    console.print(Text(f"{failure.stage}: {failure}", style="red"))
    for each in failure.failures[:MOST_FAILURES]:
        for line in each.lines(files):
            console.print(Text(line))
    return 1


@contextmanager
def _quietly() -> Iterator[None]:
    """What verl and its libraries print of each prompt is kept out of the report."""
    import datasets

    datasets.disable_progress_bars()
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


class _Watchdog:
    """Ends this process where the user's code hangs, and says where it does."""

    def __init__(self, timeout_s: float, console: Console, files: Mapping[str, str]):
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timeout_s, self._console, self._files = timeout_s, console, files

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        hung = Failure("Timeout", f"still running after {self._timeout_s:.0f} s", list(_frames_now()))
        failure = RehearsalError("the job's own code does not end", stage="sessions", failures=[hung])
        _show(failure, self._files, self._console)
        if not hung.own:
            faulthandler.dump_traceback(file=sys.stderr)
        sys.stdout.flush()
        os._exit(1)  # a thread that hangs would keep the process


def _frames_now() -> Iterator[Frame]:
    """Frames of all threads, and of all tasks that wait, the user's own among them."""
    for top in sys._current_frames().values():
        yield from (Frame(code.co_filename, line, code.co_name) for code, line in _outwards(top))
    for task in [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()]:
        waiting: Any = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            waiting = waiting.cr_await


def _outwards(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back
