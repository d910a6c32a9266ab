"""A plug-in that is broken says so, and ends a process that asks for it. Needs nothing but the
standard library."""

import logging
import sys
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def asks_for_padding(arguments: Sequence[str]) -> str | None:
    """The argument of a command line that wants this plug-in, if there is one: ``+padding=prompt``,
    for example."""
    for argument in arguments:
        if argument.lstrip("+").partition("=")[0].split(".")[0] == "padding":
            return argument
    return None


def report_failure(what: str) -> None:
    """To call where an exception is handled: logs it, and ends a process whose command line asks
    for padding. Any other goes on as if the plug-in were not installed."""
    logger.exception("verl_padding: %s", what)
    argument = asks_for_padding(sys.argv[1:])
    if argument is not None:
        # Not an Exception: verl swallows those.
        fix = f"Run `verl-padding doctor`, or remove {argument}."
        sys.exit(f"verl_padding: {argument}: {what} (the reason is above). {fix}")
