"""Files that somebody else may have written: refused in a line that says where."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, TypeVar

from pydantic import Field

from verl_padding.errors import PaddingDataError

T = TypeVar("T")
MAX_CAUSE = 300
"""Characters of a cause of a refusal, which may quote the file."""
Count = Annotated[int, Field(strict=True, ge=0, lt=10**18)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""Types of what a line of JSON may have."""


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


def read_lines(path: Path, *, may_be_pipe: bool = False) -> Iterator[bytes]:
    """The lines of a file, which end at newlines alone: verl does not escape U+2028 and its like.

    Args:
        may_be_pipe: whether it may be something else than a file, such as ``/dev/stdin``.

    Raises:
        PaddingDataError: it is no file: a link to a device may have no end.
    """
    if not may_be_pipe and not path.is_file():
        raise PaddingDataError(f"{path}: not a file. Move it elsewhere.")
    with path.open("rb") as file:
        yield from file


def read_objects(
    lines: Iterable[bytes], name: str, expected: str, fix: str, parse: Callable[[dict[str, Any]], T]
) -> Iterator[T]:
    """What is parsed of the objects of JSON lines; a PaddingDataError names the line that has none,
    ``steps/3.jsonl, line 7``, or that the parser raises for."""
    for number, line in enumerate(lines, start=1):
        with as_data_error(f"{name}, line {number}", expected, fix):
            parsed = parse(dict(json.loads(line)))
        yield parsed
