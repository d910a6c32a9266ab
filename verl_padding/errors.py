"""The errors of the plug-in, with one root; those of settings and data are ValueErrors as well."""

from collections.abc import Iterable
from difflib import get_close_matches


class PaddingError(Exception):
    """Root of every error that the plug-in raises for a user."""


class PaddingConfigError(PaddingError, ValueError):
    """A setting, or a combination of settings, that cannot run; raised before any worker
    starts."""


class PaddingDataError(PaddingError, ValueError):
    """A row that cannot be planned or padded, raised before any row is dispatched; or rows that a
    worker lost."""


def suggestion(value: str, choices: Iterable[str]) -> str:
    """The fix of a name that is none of the choices: the closest one, or else all."""
    names = list(choices)
    if close := get_close_matches(value, names, n=1):
        return f"Did you mean {close[0]}?"
    return f"Choices: {', '.join(names) or 'none'}."
