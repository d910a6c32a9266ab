"""How a benchmark keeps its figures: as JSON on standard output and, with ``--keep``, in a file
beside it.

A benchmark is named as it is run: the figures of ``python -m benchmarks.runs demo`` are in
``runs_demo.json``.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

Keep = Annotated[bool, typer.Option("--keep", help="Keep the figures beside the benchmark.")]

Outcome = float | str
"""A relative error, or the name of what verl raised."""

VERSIONS = ("verl", "TransferQueue", "ray", "torch", "transformers", "numpy")


def worst(errors: list[Outcome]) -> Outcome:
    """The largest relative error; an exception is worse than any."""
    raised = [error for error in errors if isinstance(error, str)]
    return raised[0] if raised else max(errors)


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
    """Cores that other work keeps busy, over two seconds; a benchmark of seconds asks before it
    begins."""
    return round(psutil.cpu_percent(interval=2.0) / 100 * (psutil.cpu_count() or 1), 2)


def report(name: str, figures: dict[str, Any], *, keep: bool, busy: float | None = None) -> None:
    """Prints and keeps the figures, with the machine and the versions that they are of.

    Args:
        figures: what JSON takes; of what is timed each value, not the median alone.
        busy: :func:`busy_cores` before the benchmark began, where seconds are kept.
    """
    measured = {
        "benchmark": name,
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine() | ({} if busy is None else {"cores_busy_with_other_work": busy}),
        "versions": {package: version(package) for package in VERSIONS},
    }
    text = json.dumps(measured | {"figures": figures}, indent=1)
    typer.echo(text)
    if keep:
        kept_file(name).write_text(text + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.machine()),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }


def kept_file(name: str) -> Path:
    """Where the figures of a benchmark are kept."""
    return Path(__file__).with_name(f"{name.replace(' ', '_')}.json")


def kept(name: str) -> dict[str, Any]:
    """The figures of a benchmark as they were last kept; FileNotFoundError without any."""
    figures: dict[str, Any] = json.loads(kept_file(name).read_text())["figures"]
    return figures
