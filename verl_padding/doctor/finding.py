"""What was checked, and what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "wrong", "not checked"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked."""

    subject: str
    """What it is: a package, or a setting by its full key."""
    verdict: Verdict
    message: str
    """What was found. If it is not ok: the value, what is the matter, and the fix."""
    details: str = ""
    """A traceback, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Findings of one kind, in the order in which they were made."""

    title: str
    findings: tuple[Finding, ...]

    @classmethod
    def run(cls, title: str, findings: Callable[[], Iterable[Finding]]) -> Check:
        """Makes findings one by one; an exception among them becomes the last one."""
        made = []
        try:
            for finding in findings():
                made.append(finding)
        except (Exception, SystemExit):  # a broken plug-in ends a process that asks for it
            made.append(wrong(title, "could not be checked", details=traceback.format_exc()))
        return cls(title=title, findings=tuple(made))


def ok(subject: str, message: str) -> Finding:
    """All is well."""
    return Finding(subject=subject, verdict="ok", message=message)


def warning(subject: str, message: str) -> Finding:
    """The job can start, but is unlikely to do what is meant."""
    return Finding(subject=subject, verdict="warning", message=message)


def wrong(subject: str, message: str, details: str = "") -> Finding:
    """The job cannot start, or not with the plug-in."""
    return Finding(subject=subject, verdict="wrong", message=message, details=details)


def not_checked(subject: str, message: str) -> Finding:
    """It cannot be known here; the message says why."""
    return Finding(subject=subject, verdict="not checked", message=message)
