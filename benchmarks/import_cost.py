"""What the plug-in adds to ``import verl``: CPU milliseconds, with it and without it, in fresh interpreters.

python -m benchmarks.import_cost
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

REPEATS = 10
IMPORT_VERL = "import time; started = time.process_time(); import verl; print(time.process_time() - started)"
# verl imported without plug-ins first: what is left to import is the plug-in's own.
IMPORT_PLUGIN = (
    "import time, verl; started = time.process_time(); import verl_padding.plugin; print(time.process_time() - started)"
)


def cpu_ms(code: str) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    command = [sys.executable, "-c", code]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(REPEATS + 1)
    ]
    return [1e3 * float(output.splitlines()[-1]) for output in outputs[1:]]  # the first one warms the file cache


def main() -> None:
    table = Table(title=f"CPU milliseconds of an import, {REPEATS} fresh interpreters")
    for column in ("import", "median", "spread"):
        table.add_column(column, justify="right")
    for name, code in (("verl, no plug-ins", IMPORT_VERL), ("verl_padding.plugin, after verl", IMPORT_PLUGIN)):
        times = cpu_ms(code)
        table.add_row(name, f"{statistics.median(times):.1f}", f"{min(times):.1f} - {max(times):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
