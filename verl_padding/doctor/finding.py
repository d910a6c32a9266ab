"""What was looked at, and what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

SHOWN = 300
"""Characters of another's error that a message shows at most."""

Verdict = Literal["ok", "warning", "wrong", "not looked at"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    """What it is: a package, or a setting by its full key."""
    verdict: Verdict
    told: str
    """What was found. If it is not ok: the value, what is the matter, and the fix."""
    details: str = ""
    """A traceback, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Findings of one kind, in the order in which they were made."""

    title: str
    findings: tuple[Finding, ...]

    @classmethod
    def at(cls, title: str, findings: Callable[[], Iterable[Finding]]) -> Look:
        """Makes findings one by one. What stops them is one too: a broken plug-in ends a process that asks for it."""
        made = []
        try:
            with panics_as_errors():
                for finding in findings():
                    made.append(finding)
        except (Exception, SystemExit):
            made.append(wrong(title, "could not be looked at", details=traceback.format_exc()))
        return cls(title=title, findings=tuple(made))


def ok(subject: str, told: str) -> Finding:
    """All is well."""
    return Finding(subject=subject, verdict="ok", told=told)


def warning(subject: str, told: str) -> Finding:
    """The job can start, but is unlikely to do what is meant."""
    return Finding(subject=subject, verdict="warning", told=told)


def wrong(subject: str, told: str, details: str = "") -> Finding:
    """The job cannot start, or not with the plug-in."""
    return Finding(subject=subject, verdict="wrong", told=told, details=details)


def not_looked_at(subject: str, told: str) -> Finding:
    """It cannot be known here; ``told`` says why."""
    return Finding(subject=subject, verdict="not looked at", told=told)


def tried(subject: str, told: str, attempt: Callable[[], object]) -> Finding:
    """Ok if the attempt raises nothing."""
    try:
        attempt()
    except (Exception, SystemExit):
        return wrong(subject, "failed", details=traceback.format_exc())
    return ok(subject, told)


def looked_for(subject: str, told: str, look: Callable[[], object]) -> Finding:
    """Ok if the look finds what it looks for, in a file of the user's."""
    try:
        look()
    except LookupError as problem:
        return wrong(subject, f"{told}: {problem}. Correct the setting, or the file.")
    return ok(subject, told)


class PanicError(Exception):
    """A panic of a library in Rust. What pyo3 raises is no ``Exception``, and passes by whatever catches these."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic of Rust's is raised as an error; what ends a process or interrupts it is raised as it is.

    Raises:
        PanicError: there was a panic.
    """
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":  # pyo3 makes the class, and no module has it
            raise
        raise PanicError(str(panic)) from None


def in_one_line(error: BaseException) -> str:
    """The innermost reason of an error: Hydra, transformers and the library `datasets` wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    told = " ".join(str(error).split())
    if len(told) > SHOWN:  # where one thing is not like another, both are at the end
        told = f"{told[: SHOWN // 2]} .. {told[-SHOWN // 2 :]}"
    return f"{type(error).__name__}: {told}"
