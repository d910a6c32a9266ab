"""Modules of Python's own that nobody gets, since a file of the user's that is found first has their name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter
from pathlib import Path

from verl_padding.doctor.finding import Finding, warning, wrong


def hidden_modules(failures: Sequence[Finding]) -> Iterator[Finding]:
    """Those that the job or what it imports has loaded here; the rest does no harm.

    Args:
        failures: what was found to fail, perhaps since one of them is hidden.
    """
    places = [] if sys.flags.safe_path else [os.getcwd()]  # where `python -m` starts to look
    places += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    seen = set()
    for folder in places:
        for name, file in _modules_in(folder):
            if name in seen or name not in sys.modules or _is_built_in(name):
                continue
            seen.add(name)
            if any(f"'{name}'" in each.told + each.details for each in failures):
                yield wrong(
                    "Python's path",
                    f"{file}: has the name of a module of Python's own, {name!r}, which all others get in its place; "
                    "what fails above is for want of that. Rename the file.",
                )
            else:
                yield warning(
                    "Python's path",
                    f"{file}: has the name of a module of Python's own, {name!r}, which verl and others may get in its "
                    "place. Rename the file.",
                )


def _modules_in(folder: str) -> Iterator[tuple[str, Path]]:
    """Names of Python's own modules that a folder has, with their files."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.removesuffix(".py") in sys.stdlib_module_names:
            file = Path(folder, name) if name.endswith(".py") else Path(folder, name, "__init__.py")
            if file.is_file():
                yield name.removesuffix(".py"), file


def _is_built_in(name: str) -> bool:
    """Whether Python finds it before it looks into any folder."""
    return BuiltinImporter.find_spec(name) is not None or FrozenImporter.find_spec(name) is not None
