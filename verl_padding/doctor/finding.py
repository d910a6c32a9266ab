"""What was checked, and what came of it."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

Verdict = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    verdict: Verdict
    """``warning``: the job can start, but is unlikely to do what is meant."""
    subject: str  # a package, or a setting by its full key
    message: str  # what was found; if it is not ok: the value, what is the matter, and the fix
    details: str = ""  # a traceback, where there is one


ok, warning, wrong = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "wrong")


@dataclass(frozen=True)
class Check:
    """Findings of one kind, in the order in which they were made."""

    title: str
    findings: tuple[Finding, ...]

    @classmethod
    def run(cls, title: str, findings: Iterable[Finding]) -> Self:
        """Makes findings one by one; an exception among them becomes the last one."""
        made = []
        try:
            for finding in findings:
                made.append(finding)
        except (Exception, SystemExit):  # a broken plug-in ends a process that asks for it
            made.append(wrong(title, "could not be checked", details=traceback.format_exc()))
        return cls(title, tuple(made))
