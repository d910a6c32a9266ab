"""How much longer than need be the slowest ranks take: verl's layout, two textbook ones, and the plan.

    python -m benchmarks.layout [--jobs 200] [--keep] [--json]

Time is counted by verl's cost of a row (24576 L + L^2), pads included, in two ways: per mini-batch, the slowest rank of
each, for ranks that meet once an optimizer step; per micro-batch, the slowest rank of each, for ranks that meet there,
as FSDP's do. Both are given relative to the lower bound of ``layouts.lower_bound``, which no layout can beat.

The plan comes twice: ``plan`` cuts the micro-batches (``padding.packer=plan``), ``plan+verl`` balances mini-batches and
leaves the micro-batches to verl's packer (``padding.packer=verl``).

Steps are compared like for like, in three ways: both at verl's number of optimizer steps, rows cut evenly in order for
the plan; both at half as many, which verl must be forced to; and with the very rows in each step that verl puts there.
Only the last compares nothing but the layout: where one row is costlier than a rank's share, what a step takes is set
by its longest row, and it is luck which rows share a step. The plan does not gather long rows in one step to be
faster: a mean over the tokens of a step would count each of their tokens less than those of short rows.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from benchmarks import layouts
from benchmarks.jobs import BatchJob, five_jobs, random_jobs
from benchmarks.results import AsJson, Keep, console, report, show

QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "most": 1.0}
ROUNDING = 1e-3
"""Part of a step that is no difference: packers stop that close to each other."""
NAMES = ("verl", "least loaded", "first fit", "plan+verl", "plan")


def measure(job: BatchJob) -> dict[str, Any]:
    """Figures of all layouts of a job, at verl's number of steps."""
    steps, dealt = job.verl_steps, layouts.verl_cells(job)
    laid = {
        "verl": layouts.verl(job, dealt),
        "least loaded": layouts.least_loaded(job, steps),
        "first fit": layouts.first_fit_decreasing(job, steps),
        "plan+verl": layouts.planned(job, steps, "verl"),
        "plan": layouts.planned(job, steps, "plan"),
    }
    assert laid["verl"].steps == steps == laid["plan"].steps
    return _figures(job, laid) | {"steps": steps}


def same_rows(job: BatchJob) -> dict[str, Any]:
    """Figures of verl and the plan with verl's rows in each step; steps of verl that hold pads alone are skipped."""
    dealt = layouts.verl_cells(job)
    mini_batch_R = [0] * len(job.tokens_R)
    for number, ranks in enumerate(dealt.cells_MD):
        for row in (row for cell in ranks for row in cell if row < len(job.tokens_R)):
            mini_batch_R[row] = number
    steps = len(set(mini_batch_R))
    return _figures(
        job,
        {
            "verl": layouts.verl(job, dealt),
            "plan+verl": layouts.planned(job, steps, "verl", mini_batch_R),
            "plan": layouts.planned(job, steps, "plan", mini_batch_R),
        },
    )


def forced(job: BatchJob, steps: int) -> dict[str, Any]:
    """Figures of verl and the plan at a number of steps that verl would not take."""
    dealt = layouts.verl_cells(job, steps)
    return _figures(
        job,
        {
            "verl": layouts.verl(job, dealt),
            "plan+verl": layouts.planned(job, steps, "verl"),
            "plan": layouts.planned(job, steps, "plan"),
        },
    )


def _figures(job: BatchJob, laid: dict[str, layouts.Laid]) -> dict[str, Any]:
    bound = layouts.lower_bound(job)
    return {
        "job": job.name,
        "rows": len(job.tokens_R),
        "ranks": job.dp_size,
        "per_mini_batch": {name: it.mini_slowest / bound for name, it in laid.items()},
        "per_micro_batch": {name: it.micro_slowest / bound for name, it in laid.items()},
        "micro_batches": {name: it.micro_batches for name, it in laid.items()},
        "pads": {name: it.pads for name, it in laid.items()},
    }


def show_five(figures: list[dict[str, Any]]) -> None:
    for measure_of in ("per_mini_batch", "per_micro_batch", "micro_batches", "pads"):
        rows = [[it["job"], *(it[measure_of][name] for name in NAMES)] for it in figures]
        if measure_of in ("micro_batches", "pads"):
            rows.append(["sum", *(sum(it[measure_of][name] for it in figures) for name in NAMES)])
        title = measure_of.replace("_", " ")
        show(title + (", over the lower bound" if title.startswith("per") else ""), ["job", *NAMES], rows)


def summary(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Spread over the random jobs: each layout over the lower bound, and verl's over the plan's.

    Ranks that meet at each micro-batch get the plan's micro-batches; those that meet once a mini-batch need none.
    """
    record: dict[str, Any] = {}
    for measure_of, ours in (("per_mini_batch", "plan+verl"), ("per_micro_batch", "plan")):
        over = {name: np.array([it[measure_of][name] for it in figures]) for name in figures[0][measure_of]}
        gain = over["verl"] / over[ours]
        record[measure_of] = {
            "over_lower_bound": {name: _quantiles(values) for name, values in over.items()},
            f"verl_over_{ours}": _quantiles(gain),
            f"{ours}_worse_than_verl": int((gain < 1 - ROUNDING).sum()),
        }
    return record


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}


def show_summary(title: str, record: dict[str, Any]) -> None:
    for measure_of, it in record.items():
        gain = next(name for name in it if name.startswith("verl_over_"))
        rows = [[name, *values.values()] for name, values in it["over_lower_bound"].items()]
        rows.append([gain.replace("_", " "), *it[gain].values()])
        show(f"{title}, {measure_of.replace('_', ' ')}, over the lower bound", ["layout", *QUANTILES], rows)
        worse = next(name for name in it if name.endswith("_worse_than_verl"))
        console.print(f"{worse.replace('_', ' ')}: in {it[worse]} jobs\n")


def gains(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Each layout over the lower bound, job by job."""
    return {
        measure_of: {name: [round(it[measure_of][name], 4) for it in figures] for name in figures[0][measure_of]}
        for measure_of in ("per_mini_batch", "per_micro_batch")
    }


def main(
    jobs: Annotated[int, typer.Option(help="Random jobs beside the five.")] = 200,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures the five jobs and as many random ones."""
    five = [measure(job) for job in five_jobs()]
    show_five(five)
    chance = list(random_jobs(jobs))
    figures, summaries = {}, {}
    for title, function in (
        ("the same rows in each step", same_rows),
        ("verl's number of steps", measure),
        ("half of verl's number of steps", lambda job: forced(job, max(1, job.verl_steps // 2))),
    ):
        measured = [function(job) for job in track(chance, title, console=console)]
        figures[title], summaries[title] = gains(measured), summary(measured)
        show_summary(f"{jobs} random jobs, {title}", summaries[title])
    record = {"five": five, "random": figures, "summary": summaries}
    report(record, benchmark=__file__, keep=keep, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
