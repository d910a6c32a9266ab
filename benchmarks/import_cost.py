"""What the plug-in adds to ``import verl``: CPU milliseconds, with it and without it, in fresh interpreters.

python -m benchmarks.import_cost [--keep] [--json]
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from benchmarks.results import AsJson, Keep, busy_cores, show, spread, tell

IMPORT_VERL = "import time; started = time.process_time(); import verl; print(time.process_time() - started)"
# verl imported without plug-ins first: what is left to import is the plug-in's own.
IMPORT_PLUGIN = (
    "import time, verl; started = time.process_time(); import verl_padding.plugin; print(time.process_time() - started)"
)
IMPORTS = {"verl": IMPORT_VERL, "plugin": IMPORT_PLUGIN}


def cpu_ms(code: str, repeats: int) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    command = [sys.executable, "-c", code]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(repeats + 1)
    ]
    return [1e3 * float(output.splitlines()[-1]) for output in outputs[1:]]  # the first one warms the file cache


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Fresh interpreters of each kind.")] = 10,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures verl without plug-ins, and the plug-in behind it."""
    busy = busy_cores()
    milliseconds = {name: cpu_ms(code, repeats) for name, code in IMPORTS.items()}
    labels = {"verl": "verl, no plug-ins", "plugin": "verl_padding.plugin, after verl"}
    show(
        f"CPU milliseconds of an import, {repeats} fresh interpreters: median (least-most)",
        ["import", "milliseconds"],
        [[labels[name], spread(values, 1)] for name, values in milliseconds.items()],
    )
    tell({"milliseconds": milliseconds}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
