"""Relative errors of gradients: the worst of several, and as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence

Outcome = float | str
"""A relative error, or the name of what verl raised."""


def worst(errors: Sequence[Outcome]) -> Outcome:
    """The largest; an exception is worse than any."""
    raised = [error for error in errors if isinstance(error, str)]
    return raised[0] if raised else max(error for error in errors if not isinstance(error, str))


def shown(error: Outcome) -> str:
    """0, NaN, 2.6e-16, 49.2 %, or the name of an exception."""
    if isinstance(error, str):
        return error
    if error != error or error == 0:
        return "NaN" if error else "0"
    if error < 1e-3:
        return f"{error:.1e}"
    return f"{100 * error:.0f} %" if error >= 1 else f"{100 * error:.1f} %"
