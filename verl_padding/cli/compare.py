"""The command ``verl-padding compare``: draws several runs into one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl_padding.errors import PaddingDataError
from verl_padding.runs.charts import refuse_unwritable
from verl_padding.runs.curves import RunCurves, draw, table_of


def compare_runs(runs: Sequence[Path], picture: Path) -> int:
    """Prints a table of some runs and draws them; returns the exit code, 1 for a refusal."""
    try:
        refuse_unwritable(picture)
        curves = RunCurves.read_all(runs)
        draw(curves, picture)
    except PaddingDataError as refusal:
        Console(stderr=True).print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console = Console()
    console.print(table_of(curves))
    console.print(f"The picture is in {picture}.", markup=False, highlight=False, soft_wrap=True)
    return 0
