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
    begun = [line for line in lines if line["what"] == "begins"]
    machine = {name: begun[0][name] for name in ("card", "driver", "versions", "measured")}
    machine["commands"] = [line["command"] for line in begun]
    figures = [
        {k: v for k, v in line.items() if k != "at_s"} for line in lines if line["what"] not in ("begins", "done")
    ]
    if (attention := folder / "attention.json").exists():  # of benchmarks/tree_attention.py
        machine["commands"].append("attention")
        figures += [{"part": "attention", **each} for each in json.loads(attention.read_text())["figures"]]
    place = beside / f"{machine['card'].lower().replace(' ', '_')}.json"
    a_line_each = ",\n  ".join(map(json.dumps, figures))
    place.write_text(f'{json.dumps(machine)[:-1]},\n "figures": [\n  {a_line_each}\n ]}}\n')
    return place
