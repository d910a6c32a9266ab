"""Writes the results of docs/evidence.md from the figures that benchmarks keep.

    python -m benchmarks.results_page

Words and tables are in the template ``benchmarks/results.md.jinja``; no figure is typed. A test
compares the page with what this renders.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks import guess, learning
from benchmarks.results import kept, kept_file, shown, worst
from benchmarks.runs import runs_of
from verl_padding.plan import padded_rows

CARD = Path(__file__).parent / "one_gpu" / "nvidia_h100_80gb_hbm3.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "evidence.md"
FIRST = "runs demo"
"""The benchmark whose versions the page begins with."""
RESULTS = "results"
"""Name of the part of the page."""


def part_marks(name):
    """The comments before and after a generated part of a page, which no reader sees."""
    return f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->\n"


def part_of(page, name):
    """A generated part of a page's text."""
    start, end = part_marks(name)
    return page.split(start)[1].split(end)[0]


def with_part(page, name, text):
    """The page's text with another generated part."""
    start, end = part_marks(name)
    before, rest = page.split(start)
    return before + start + text + end + rest.split(end)[1]


def rendered():
    """The results, from the kept figures."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    actor_rows = stock_mini_batch()
    environment.filters |= {
        "spread": spread,
        "ratios": ratios,
        "span": span,
        "error": shown,
        "each": each,
        "is_off": is_off,
        "losses": losses,
        "total": lambda runs, name: sum(each(runs, name)),
        "stock_steps": lambda rows: padded_rows(rows, actor_rows) // actor_rows,
        "stock_pads": lambda rows: padded_rows(rows, actor_rows) - rows,
    }
    card, *figures = map(json.loads, CARD.read_text().splitlines())
    return environment.get_template("results.md.jinja").render(
        kept=kept,
        measured=measured,
        median=median,
        runs_of=runs_of,
        packages=packages(record_of(FIRST)),
        guess=guess,
        learning=learning,
        card=card,
        figures=figures,
        gpu=gpu_updates(figures),
    )


def stock_mini_batch():
    """Rows of a mini-batch of stock verl in the demo, which its two ranks divide."""
    it = kept("runs demo")["recipe"]["actor_rollout_ref"]
    return it["actor"]["ppo_mini_batch_size"] * it["rollout"]["n"]


def gpu_updates(figures):
    """Of each model, batch and side of the updates on a GPU: seconds, and how many times as fast as
    stock verl."""
    rounds: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in figures:
        if (line["part"], line["what"]) == ("speed", "update"):
            rounds[line["model"], line["batch"], line["side"]].append(line)
    seconds = {
        key: median(line["update_s"] + line["pass_s"] for line in taken)
        for key, taken in rounds.items()
    }
    return [
        {
            "model": model,
            "batch": batch,
            "side": side,
            "seconds": seconds[model, batch, side],
            "speed_up": seconds[model, batch, "stock verl"] / seconds[model, batch, side],
            "peak_gib": max(line["peak_gib"] for line in taken),
            "sharing_factor": taken[0].get("sharing_factor"),
        }
        for (model, batch, side), taken in rounds.items()
    ]


def losses(lines):
    """Cells of the table of losses -> the losses that have them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        theirs, ours = line["stock verl"], line["verl_padding"]
        errors = (
            theirs["token-mean"],
            theirs["seq-mean-token-mean"],
            worst([*theirs.values()]),
            worst([*ours.values()]),
        )
        found.setdefault(tuple(map(shown, errors)), []).append(f"`{line['loss']}`")
    return found


def is_off(errors):
    """Whether a relative error is above rounding, or an exception's name."""
    return not all(isinstance(error, float) and error < 1e-6 for error in errors)


def each(runs: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """A figure of each run; of each of its batches, where it has one a batch."""
    values = [run[name] for run in runs]
    return [one for value in values for one in value] if isinstance(values[0], list) else values


def spread(values, digits=2):
    """Median, least and most: 1.48 (1.23 to 1.72)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def span(values):
    """Least and most: 4 to 12, or 4 where all are."""
    return " to ".join(str(value) for value in sorted({min(values), max(values)}))


def ratios(side, other):
    """CPU seconds of ``other`` over those of ``side``, round by round: how many times as fast the
    side is."""
    return [theirs["cpu"] / its["cpu"] for its, theirs in zip(side, other, strict=True)]


def record_of(name):
    """All that is kept of a benchmark."""
    return json.loads(kept_file(name).read_text())


def packages(record):
    """Versions that a benchmark was run with."""
    versions = record["versions"]
    python = record["machine"]["python"]
    return f"Python {python}, verl {versions['verl']}, torch {versions['torch']}"


def measured(name, command=None):
    """When and where a benchmark was run, and with which versions where these are not those of
    the first one."""
    record = record_of(name)
    machine, own = record["machine"], packages(record)
    where = f"{machine['cores']} cores ({machine['processor']})"
    if (busy := machine.get("cores_busy_with_other_work", 0)) >= 0.1:
        where += f", {busy:.1f} of them busy with other work"
    if own != packages(record_of(FIRST)):
        where += f", {own}"
    return f"`python -m {command or f'benchmarks.{name}'}`, {record['measured']}: {where}"


if __name__ == "__main__":
    PAGE.write_text(with_part(PAGE.read_text(), RESULTS, rendered()))
