"""Files that somebody else may have written: read up to a bound, and refused in a line that says
where."""

import json
import math
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, TypeVar

import yaml
from omegaconf import OmegaConf
from pydantic import FailFast, Field

from verl_padding.errors import PaddingDataError

MAX_BYTES, MAX_LINE_BYTES, MAX_TEXT_BYTES = 1 << 32, 1 << 26, 1 << 22
"""Most bytes of a file of lines, of one of its lines, and of a file that is read as a whole."""
MAX_DIGITS, MAX_NUMBER = 18, 1e300
"""Of an integer, which so fits int64, and of any number, so that sums of them are finite."""
T = TypeVar("T")
MAX_CAUSE = 300
"""Characters of a cause of a refusal, which may quote the file."""
SHORTEN = "Give a shorter one"
Count = Annotated[int, Field(strict=True, ge=0, lt=10**MAX_DIGITS)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Counts = Annotated[tuple[Count, ...], FailFast()]
Texts = Annotated[tuple[str, ...], FailFast()]
"""Types of what a line of JSON may have; one value of another kind ends a line's check."""


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
    """The lines of a file, which end at newlines alone.

    Args:
        may_be_pipe: whether it may be something else than a file, such as ``/dev/stdin``.

    Raises:
        PaddingDataError: it is no file, or it or a line of it is too long.
    """
    if not may_be_pipe:
        _check_is_file(path)
    left = MAX_BYTES
    with path.open("rb") as file:
        for number in range(1, MAX_BYTES):
            line = file.readline(MAX_LINE_BYTES + 1)
            left -= len(line)
            if len(line) > MAX_LINE_BYTES or left < 0:
                what = f"a line of over {MAX_LINE_BYTES} bytes, or {MAX_BYTES} in all"
                raise PaddingDataError(f"{path}, line {number}: {what}. {SHORTEN}.")
            if not line:
                return
            yield line


def read_text(path: Path) -> str:
    """A short text in UTF-8; a PaddingDataError if it is another file."""
    _check_is_file(path)
    with path.open("rb") as file:
        text = file.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise PaddingDataError(f"{path}: over {MAX_TEXT_BYTES} bytes. {SHORTEN}.")
    with as_data_error(str(path), "a text in UTF-8", "Move it elsewhere"):
        return text.decode()


def read_yaml(path: Path) -> Any:
    """A short file of YAML, as a config of OmegaConf; nothing in it is resolved or made."""
    text = read_text(path)
    # A few of them can stand for more than fits into memory.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has an alias, *..")
    return OmegaConf.create(text)


def _check_is_file(path: Path) -> None:
    # A link to a device has no end, and a pipe may have no beginning.
    if not stat.S_ISREG(path.stat().st_mode):
        raise PaddingDataError(f"{path}: not a file. Move it elsewhere.")


def load_json(text: bytes) -> Any:
    """A value of JSON, in which numbers beyond :data:`MAX_DIGITS` or :data:`MAX_NUMBER` are
    infinite."""
    return json.loads(text, parse_int=_integer, parse_float=_float)


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else _float(digits)


def _float(digits: str) -> float:
    number = float(digits)
    return number if abs(number) <= MAX_NUMBER else math.copysign(math.inf, number)


def read_objects(
    lines: Iterable[bytes], name: str, expected: str, fix: str, parse: Callable[[dict[str, Any]], T]
) -> Iterator[T]:
    """What is parsed of the objects of JSON lines; a PaddingDataError names the line that has none,
    ``steps/3.jsonl, line 7``, or that the parser raises for."""
    for number, line in enumerate(lines, start=1):
        with as_data_error(f"{name}, line {number}", expected, fix):
            parsed = parse(dict(load_json(line)))
        yield parsed
