"""The root of the plug-in's errors and its kinds, what blocks a saving, and the words of both."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn


class PaddingError(Exception):
    """Root of every error that the plug-in raises for a user."""


class PaddingConfigError(PaddingError, ValueError):
    """A setting, or several beside each other, that cannot run."""


class PaddingDataError(PaddingError, ValueError):
    """Rows, or a file of them, that cannot be read, planned, padded or trained as planned; an
    argument that cannot be used."""


class PlanError(PaddingError, ValueError):
    """Rows or a job that cannot be planned, in one line."""


def suggestion(value: str, choices: Iterable[str]) -> str:
    """The fix of a name that is none of the choices: the closest one, or else all."""
    names = list(choices)
    if close := get_close_matches(value, names, n=1):
        return f"Did you mean {close[0]}?"
    return f"Choices: {', '.join(names) or 'none'}."


def plural(number: int, thing: str) -> str:
    """
    >>> plural(1, "pad"), plural(1200, "pad"), plural(2, "micro-batch")
    ('1 pad', '1200 pads', '2 micro-batches')
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith(('ch', 'ss')) else 's'}"


@dataclass(frozen=True)
class Incompatibility:
    """Why a job cannot have a saving."""

    setting: str
    """With its value: ``actor_rollout_ref.actor.use_kl_loss=True``."""
    why: str
    fix: str
    """What would have to change, as a sentence."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}. {self.fix}"


def refuse(setting: str, why: str, fix: str) -> NoReturn:
    """Refuses a job, by a setting with its value, with a PaddingConfigError."""
    raise PaddingConfigError(f"{setting}: {why}. {fix}")
