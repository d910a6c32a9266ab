"""What a dry run has found wrong."""

import traceback
from collections.abc import Sequence

from verl_padding.errors import PaddingError

FRAMES = 6  # of each exception in a traceback: the innermost ones


class DryRunError(PaddingError):
    """What is wrong with a job, in a sentence; and tracebacks, or what the job has printed."""

    def __init__(self, message: str, details: Sequence[str] = ()):
        super().__init__(message)
        self.details = details


def traceback_of(error: BaseException) -> str:
    """The exception with those that it comes from, as Python shows them, without outer frames."""
    return "".join(traceback.format_exception(error, limit=-FRAMES))
