"""Figures that are kept line by line, as soon as they are there: a part that is stopped leaves what it has shown."""

import json
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()


class Figures:
    """The results of a part, in ``<folder>/results.jsonl`` and on standard output."""

    def __init__(self, part: str, folder: Path):
        self.part, self._file = part, folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, what: str, **figures: Any) -> None:
        line = json.dumps({"part": self.part, "what": what, "at_s": round(seconds(), 1)} | figures)
        print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")


def seconds() -> float:
    """Since the process began."""
    return time.perf_counter() - STARTED


def collect(folder: Path, beside: Path) -> Path:
    """Gathers a folder's results in one file, named after the card; its parts may come from several runs."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    begun = next(line for line in lines if line["what"] == "begins")
    of_machine = {name: begun[name] for name in ("card", "driver", "versions", "measured")}
    kept = [{k: v for k, v in line.items() if k != "at_s"} for line in lines if line["what"] not in ("begins", "done")]
    place = beside / f"{begun['card'].lower().replace(' ', '_')}.json"
    place.write_text(json.dumps(of_machine | {"commands": begun["commands"], "figures": kept}, indent=1) + "\n")
    return place
