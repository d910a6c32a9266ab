"""How a benchmark tells its figures: tables on standard error, all of them as JSON on standard output."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


def seconds_of(function: Callable[[], Any], repeats: int) -> list[float]:
    """Wall-clock seconds of each call."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return taken


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, and the least and the most."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    console.print(table)


def write(figures: dict[str, Any]) -> None:
    """The figures and the machine, as JSON."""
    machine = {
        "cpus": psutil.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("verl", "torch", "numpy")},
    }
    json.dump({"machine": machine, **figures}, sys.stdout, indent=1)
    sys.stdout.write("\n")
