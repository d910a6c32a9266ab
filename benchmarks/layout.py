"""How much longer than need be the slowest ranks take: verl's layout, by its own functions, and the
plan, at verl's number of optimizer steps.

    python -m benchmarks.layout [--jobs 200] [--keep]

Time is counted by verl's cost of a row (24576 L + L^2), pads included: per mini-batch, the slowest
rank of each; per micro-batch, the slowest rank of each, for ranks that meet there, as FSDP's do.
Both are relative to :func:`lower_bound`, which no layout can beat. ``plan`` cuts the micro-batches
(``padding.packer=plan``), ``plan+verl`` leaves them to verl's packer.

A step with a long row takes what that row takes, and it is luck which rows share a step: so the
plan may be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.jobs import BatchJob, five_jobs, random_jobs
from benchmarks.one_gpu.rows import job_of
from benchmarks.results import Keep, report
from verl_padding.cli.stock_layout import pack_as_verl, pad_tokens_of_verl, verl_layout
from verl_padding.plan import COST_MODELS, Rows, plan_batch
from verl_padding.plan.layout import RowsMDK
from verl_padding.plan.row_keys import row_key

ROUNDING = 1e-3
"""Part of a step that is no difference: packers stop that close to each other."""
PAD_TOKENS = 2


def costs_of(tokens: Sequence[int]) -> np.ndarray:
    return COST_MODELS["attention"](np.array(tokens, dtype=np.int64))


def slowest(rows_MDK: RowsMDK, tokens_R: Sequence[int]) -> tuple[float, float]:
    """What ranks take that meet once a mini-batch, and what ranks take that meet at each
    micro-batch."""
    cost_R = costs_of(tokens_R)
    per_mini = per_micro = 0
    for rows_DK in rows_MDK:
        # Ranks with different numbers of micro-batches would hang: they make no array.
        cost_DK = np.array([[cost_R[list(rows)].sum() for rows in rows_K] for rows_K in rows_DK])
        per_mini += cost_DK.sum(axis=1).max()
        per_micro += cost_DK.max(axis=0).sum()
    return per_mini, per_micro


def verl(job: BatchJob) -> tuple[float, float]:
    """verl's cells, cut into micro-batches by its packer."""
    rows_MDK = verl_layout(
        job.tokens_R,
        dp_size=job.dp_size,
        mini_batch_rows=job.mini_batch_rows,
        token_budget=job.token_budget,
    )
    # Pads are numbered behind the rows, and fewer than those of a mini-batch.
    return slowest(rows_MDK, [*job.tokens_R, *[pad_tokens_of_verl()] * job.mini_batch_rows])


def planned(job: BatchJob, packer: str) -> tuple[float, float]:
    """The plan, which cuts the steps in the order of the rows."""
    keys = [row_key(str(row), 0, 0) for row in range(len(job.tokens_R))]
    shape = job_of(
        strategy="rows",
        prompts=job.verl_steps,
        sessions=1,
        mini_prompts=1,
        ranks=job.dp_size,
        budget=job.token_budget,
        packer=packer,
        pad_tokens=PAD_TOKENS,
    )
    layout = plan_batch(Rows.from_keys(keys, job.tokens_R), shape).layouts["actor"]
    tokens = [*job.tokens_R, *[PAD_TOKENS] * layout.n_pads]
    if packer == "verl":
        return slowest(
            [pack_as_verl(cells_D, tokens, job.token_budget) for cells_D in layout.local_batches],
            tokens,
        )
    return slowest(layout.rows_MDK, tokens)


def lower_bound(job: BatchJob) -> float:
    """The real rows' cost shared out evenly.

    However rows are cut into mini-batches and micro-batches: in each, the slowest rank costs at
    least the mean of the ranks, and the means add up to this.
    """
    return float(costs_of(job.tokens_R).sum()) / job.dp_size


def measure(job: BatchJob) -> dict[str, Any]:
    """Each layout of a job, over the lower bound."""
    bound = lower_bound(job)
    found = {
        "verl": verl(job),
        "plan+verl": planned(job, "verl"),
        "plan": planned(job, "plan"),
    }
    return {
        "job": job.name,
        "per_mini_batch": {name: mini / bound for name, (mini, _) in found.items()},
        "per_micro_batch": {name: micro / bound for name, (_, micro) in found.items()},
    }


def summary(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """verl's time over the plan's, over the jobs, and in how many the plan is slower."""
    record: dict[str, Any] = {}
    for clock, ours in (("per_mini_batch", "plan+verl"), ("per_micro_batch", "plan")):
        gain = np.array([each[clock]["verl"] / each[clock][ours] for each in figures])
        spread = {"least": gain.min(), "median": np.median(gain), "most": gain.max()}
        record[clock] = {
            f"verl_over_{ours}": {name: float(value) for name, value in spread.items()},
            f"{ours}_worse_than_verl": int((gain < 1 - ROUNDING).sum()),
        }
    return record


def main(jobs: int = 200, keep: Keep = False) -> None:
    """Measures the five jobs and as many random ones."""
    figures = {
        "five": [measure(job) for job in five_jobs()],
        "random": summary([measure(job) for job in track(list(random_jobs(jobs)))]),
    }
    report("layout", figures, keep=keep)


if __name__ == "__main__":
    typer.run(main)
