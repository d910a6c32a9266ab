"""How much longer than need be the slowest ranks take: verl's layout, by its own functions, and the plan.

    python -m benchmarks.layout [--jobs 200] [--keep] [--json]

Time is counted by verl's cost of a row (24576 L + L^2), pads included, in two ways: per mini-batch, the slowest rank of
each, for ranks that meet once an optimizer step; per micro-batch, the slowest rank of each, for ranks that meet there,
as FSDP's do. Both are given relative to :func:`lower_bound`, which no layout can beat.

The plan comes twice: ``plan`` cuts the micro-batches (``padding.packer=plan``), ``plan+verl`` balances mini-batches and
leaves the micro-batches to verl's packer (``padding.packer=verl``).

Steps are compared like for like, in two ways: both at verl's number of optimizer steps, rows cut evenly in order for
the plan; and with the very rows in each step that verl puts there. Only the last compares nothing but the layout: where
one row is costlier than a rank's share, what a step takes is set by its longest row, and it is luck which rows share a
step. The plan does not gather long rows in one step to be faster: a mean over the tokens of a step would count each of
their tokens less than those of short rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.jobs import BatchJob, five_jobs, random_jobs
from benchmarks.results import AsJson, Keep, console, report, show
from verl_padding.plan import COST_MODELS, Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.mini_batch_costs import mini_batch_costs
from verl_padding.plan.row_keys import row_key
from verl_padding.stock.padding import VERL_PAD_TOKENS, deal_as_verl, pack_as_verl

QUANTILES = {"least": 0.0, "median": 0.5, "most": 1.0}
ROUNDING = 1e-3
"""Part of a step that is no difference: packers stop that close to each other."""
NAMES = ("verl", "plan+verl", "plan")
PAD_TOKENS = 2
attention_cost = COST_MODELS["attention"]

Bins = list[list[int]]
"""Token counts of the rows of each micro-batch of a rank."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """What a layout costs, by verl's cost of a row, pads included."""

    mini_slowest: int
    """Cost of the slowest rank of each mini-batch, summed: what ranks take that meet once a mini-batch."""
    micro_slowest: int
    """Cost of the slowest rank of each micro-batch, summed: what ranks take that meet at each."""
    micro_batches: int
    """Of a rank, over the mini-batches."""
    pads: int
    steps: int

    @classmethod
    def of(cls, bins_MD: Sequence[Sequence[Bins]], pads: int) -> Laid:
        for bins_D in bins_MD:
            assert len(set(map(len, bins_D))) == 1, "ranks with different numbers of micro-batches hang"
        # Pads are counted by their tokens too: all that is laid out counts as rows here.
        number = count()
        rows_MDK = [[[[next(number) for _ in rows] for rows in bins] for bins in bins_D] for bins_D in bins_MD]
        tokens = [length for bins_D in bins_MD for bins in bins_D for rows in bins for length in rows]
        costs = CallCosts(
            call=Pass(dp_size=len(bins_MD[0])),
            tokens_R=np.array(tokens, dtype=np.int64),
            cost_model=attention_cost,
            pad_tokens=PAD_TOKENS,
        )
        steps = mini_batch_costs(rows_MDK, costs)
        return cls(
            mini_slowest=sum(step.mini_slowest for step in steps),
            micro_slowest=sum(step.micro_slowest for step in steps),
            micro_batches=sum(step.micro_batches for step in steps),
            pads=pads,
            steps=len(steps),
        )


def verl_cells(job: BatchJob) -> tuple[list[list[list[int]]], int]:
    """Rows of each mini-batch and rank as verl deals them out, pads numbered behind the rows; and the pads' number."""
    return deal_as_verl(job.tokens_R, dp_size=job.dp_size, mini_batch_rows=job.mini_batch_rows)


def verl(job: BatchJob) -> Laid:
    """verl's cells, cut into micro-batches by its packer."""
    cells_MD, pads = verl_cells(job)
    tokens = job.tokens_R + [VERL_PAD_TOKENS] * pads
    return Laid.of([_tokens_of(pack_as_verl(cells_D, tokens, job.token_budget), tokens) for cells_D in cells_MD], pads)


def _tokens_of(rows_DK: Sequence[Sequence[Sequence[int]]], tokens_R: Sequence[int]) -> list[Bins]:
    return [[[tokens_R[row] for row in rows] for rows in rows_K] for rows_K in rows_DK]


def planned(job: BatchJob, steps: int, packer: str, mini_batch_R: Sequence[int] | None = None) -> Laid:
    """The plan for as many steps; with ``packer=verl``, its micro-batches are left to verl's packer.

    Args:
        mini_batch_R: the mini-batch that each row must be in; None to let the plan cut them, in order.
    """
    names = range(len(job.tokens_R)) if mini_batch_R is None else mini_batch_R
    rows = Rows.from_keys([row_key(name, 0, row) for row, name in enumerate(names)], job.tokens_R)
    update = Update(dp_size=job.dp_size, token_budget=job.token_budget, prompts_per_mini_batch=1)
    shape = Job(
        strategy="rows" if mini_batch_R is None else "prompt",
        prompts=steps,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={},
        packer=packer,
        pad_tokens=PAD_TOKENS,
    )
    layout = plan_batch(rows, shape).layouts["actor"]
    tokens = job.tokens_R + [PAD_TOKENS] * layout.n_pads
    bins_MD = []
    for mini_batch, cells_D in enumerate(layout.cells):
        if packer == "verl":
            rows_DK = pack_as_verl(cells_D, tokens, job.token_budget)
        else:
            rows_DK = [layout.micro_batches(mini_batch, rank) for rank in range(layout.dp_size)]
        bins_MD.append(_tokens_of(rows_DK, tokens))
    return Laid.of(bins_MD, layout.n_pads)


def lower_bound(job: BatchJob) -> float:
    """The real rows' cost shared out evenly.

    However rows are cut into mini-batches and micro-batches: in each, the slowest rank costs at least the mean of the
    ranks, and the means add up to this.
    """
    return float(attention_cost(np.array(job.tokens_R)).sum()) / job.dp_size


def measure(job: BatchJob) -> dict[str, Any]:
    """Figures of all layouts of a job, at verl's number of steps."""
    steps = job.verl_steps
    laid = {
        "verl": verl(job),
        "plan+verl": planned(job, steps, "verl"),
        "plan": planned(job, steps, "plan"),
    }
    assert laid["verl"].steps == steps == laid["plan"].steps
    return _figures(job, laid) | {"steps": steps}


def same_rows(job: BatchJob) -> dict[str, Any]:
    """Figures of verl and the plan with verl's rows in each step; steps of verl that hold pads alone are skipped."""
    cells_MD, _ = verl_cells(job)
    mini_batch_R = [0] * len(job.tokens_R)
    for number, ranks in enumerate(cells_MD):
        for row in (row for cell in ranks for row in cell if row < len(job.tokens_R)):
            mini_batch_R[row] = number
    steps = len(set(mini_batch_R))
    return _figures(
        job,
        {
            "verl": verl(job),
            "plan+verl": planned(job, steps, "verl", mini_batch_R),
            "plan": planned(job, steps, "plan", mini_batch_R),
        },
    )


def _figures(job: BatchJob, laid: dict[str, Laid]) -> dict[str, Any]:
    bound = lower_bound(job)
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


def main(
    jobs: Annotated[int, typer.Option(help="Random jobs beside the five.")] = 200,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures the five jobs and as many random ones."""
    five = [measure(job) for job in five_jobs()]
    show_five(five)
    chance = list(random_jobs(jobs))
    summaries = {}
    for title, function in (
        ("the same rows in each step", same_rows),
        ("verl's number of steps", measure),
    ):
        summaries[title] = summary([function(job) for job in track(chance, title, console=console)])
        show_summary(f"{jobs} random jobs, {title}", summaries[title])
    record = {"five": five, "summary": summaries}
    report(record, benchmark=__file__, keep=keep, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
