"""How a benchmark tells its figures: tables on standard error, JSON where it is asked for, a file that is kept.

Every benchmark takes the same two options: ``--json`` prints all figures by name, and what they were measured on beside
them; ``--keep`` writes both beside the benchmark (``benchmarks/demo_seeds.json`` beside ``benchmarks/demo_seeds.py``).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
"""Tables are wide: rich would cut them to 80 columns where there is no terminal."""

Keep = Annotated[bool, typer.Option("--keep", help="Keep the figures beside the benchmark, for the pages to quote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")]

Outcome = float | str
"""A relative error, or the name of what verl raised."""

VERSIONS = ("verl", "TransferQueue", "ray", "torch", "transformers", "numpy")
_STARTED = time.time()


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


def worst(errors: Sequence[Outcome]) -> Outcome:
    """The largest relative error; an exception is worse than any."""
    raised = [error for error in errors if isinstance(error, str)]
    return raised[0] if raised else max(error for error in errors if not isinstance(error, str))


def shown(error: Outcome) -> str:
    """A relative error as a page shows it: 0, NaN, 2.6e-16, 49.2 %, or the name of an exception."""
    if isinstance(error, str):
        return error
    if error != error or error == 0:
        return "NaN" if error else "0"
    if error < 1e-3:
        return f"{error:.1e}"
    return f"{100 * error:.0f} %" if error >= 1 else f"{100 * error:.1f} %"


def busy_cores() -> float:
    """Cores that the machine is busy with, over two seconds: to be asked for before a benchmark works itself."""
    return round(psutil.cpu_percent(interval=2.0) / 100 * (psutil.cpu_count() or 1), 2)


def report(figures: dict[str, Any], *, benchmark: str, keep: bool, as_json: bool, busy: float | None = None) -> None:
    """Prints and keeps the figures, with the machine and the versions that they are of.

    Args:
        figures: what JSON takes; of what is timed each value, not the median alone.
        benchmark: its file, ``__file__``.
        keep: write them beside it.
        as_json: print them on standard output.
        busy: :func:`busy_cores` before it began, where seconds are kept.
    """
    measured = {
        "benchmark": Path(benchmark).stem,
        "measured": datetime.fromtimestamp(_STARTED, UTC).strftime("%Y-%m-%d"),
        "machine": machine() | ({} if busy is None else {"cores_busy_with_other_work": busy}),
        "versions": {name: version(name) for name in VERSIONS},
    }
    if as_json:
        typer.echo(json.dumps(figures | measured, indent=1))
    if keep:
        path = kept_file(Path(benchmark).stem)
        path.write_text(json.dumps(measured | {"figures": figures}, indent=1) + "\n")
        console.print(f"kept in {path.name}")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def kept_file(benchmark: str) -> Path:
    """Where the figures of a benchmark are kept."""
    return Path(__file__).with_name(f"{benchmark}.json")


def kept(benchmark: str) -> dict[str, Any]:
    """The figures of a benchmark as they were last kept.

    Raises:
        FileNotFoundError: none were.
    """
    figures: dict[str, Any] = json.loads(kept_file(benchmark).read_text())["figures"]
    return figures


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
