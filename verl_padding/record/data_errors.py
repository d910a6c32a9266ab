"""The refusal of a file that holds something else."""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from verl_padding.errors import PaddingDataError

MAX_CAUSE = 300
"""Characters of a cause, which may quote the file."""


@contextmanager
def as_data_error(name: str, expected: str, fix: str) -> Iterator[None]:
    """Turns what reading a file of another kind raises into a PaddingDataError of one line."""
    try:
        yield
    except PaddingDataError:
        raise
    except Exception as error:  # of any kind, by what is in the file
        why = shorten(f"{type(error).__name__}: {error}", MAX_CAUSE, placeholder=" ..")
        raise PaddingDataError(f"{name}: not {expected} ({why}). {fix}.") from error
