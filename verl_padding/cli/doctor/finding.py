"""What was checked, and what came of it."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from omegaconf.errors import OmegaConfBaseException

from verl_padding.errors import PaddingError

Verdict = Literal["ok", "hint", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    verdict: Verdict
    """``hint``: the job is fine, and could have something more. ``warning``: it can start, but is
    unlikely to do what is meant."""
    subject: str  # a package, or a setting by its full key
    message: str  # what was found; if it is not ok: the value, what is the matter, and the fix


ok, hint = partial(Finding, "ok"), partial(Finding, "hint")
warning, wrong = partial(Finding, "warning"), partial(Finding, "wrong")


def run_check(subject: str, findings: Iterable[Finding]) -> list[Finding]:
    """Makes findings one by one; a refusal or an exception among them becomes the last one."""
    made = []
    try:
        for finding in findings:
            made.append(finding)
    except PaddingError as refusal:
        setting, _, message = str(refusal).partition(": ")
        made.append(wrong(setting, message))
    except OmegaConfBaseException as error:  # of a setting that was taken out of verl's config
        why = " ".join(str(error).split())
        made.append(wrong(error.full_key or subject, f"{why}. Set it."))
    except (Exception, SystemExit):  # a broken plug-in ends a process that asks for it
        made.append(wrong(subject, f"could not be checked\n{traceback.format_exc()}"))
    return made
