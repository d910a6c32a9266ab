"""The refusal of a file that holds something else."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_padding.errors import PaddingDataError


@contextmanager
def as_data_error(name: str, expected: str, fix: str) -> Iterator[None]:
    """Turns what reading JSON of another kind raises into a PaddingDataError of one line."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise PaddingDataError(f"{name}: not {expected} ({why}). {fix}.") from error
    except RecursionError as error:  # "[[[[.."
        raise PaddingDataError(f"{name}: not {expected} (too deep). {fix}.") from error
