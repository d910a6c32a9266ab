"""What each step of the planner's search is worth: it is taken out, and random jobs are planned without it.

    python -m benchmarks.search_steps [--jobs 200] [--keep] [--json]

A plan's time is that of its slowest ranks, with what the handling of micro-batches and pads takes: what the search
minimizes. A step stays if a plan without it takes 0.1 % longer at the median, or 1 % at worst.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks.jobs import random_jobs
from benchmarks.results import AsJson, Keep, report, show
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.packing import bins, by_level, cells, pads
from verl_padding.plan.planner import costs_of
from verl_padding.plan.row_keys import row_key

PAD_TOKENS = 2
SYNCHRONIZE_ONCE = 4
"""Of so many jobs, the ranks of one synchronize once a mini-batch; those of the others at every micro-batch."""

STEPS: dict[str, tuple[Any, str, Any]] = {
    "exchanges between bins": (by_level, "exchange", lambda items_B, *_, **__: items_B),
    "heavy levels filled first": (
        by_level.LevelPacker,
        "_pack_heavy_first",
        lambda packer, n_levels: packer._pack_together(n_levels),
    ),
    "all bins in turns": (by_level.LevelPacker, "_pack_together", lambda packer, n_levels: None),
    "guesses of the light levels' height": (by_level, "PASSES", 1),
    "first fit as one way": (by_level, "first_fit", lambda tokens, cost, budget: []),
    "more levels than the least": (by_level, "MORE_LEVELS", 0),
    "several ways polished": (by_level, "POLISHED", 1),
    "moves and swaps between ranks": (bins, "exchange", lambda items_B, *_, **__: items_B),
    "sizes between least and free": (cells, "sizes_between", lambda least, free, multiple: []),
    "sizes that cuts ask for": (by_level, "sizes_between", lambda least, free, multiple: []),
    "rows that move to make cells fit": (
        pads,
        "_shrink",
        lambda costs, cut, size: cut if pads.least_rows(cut.rows_DK) <= size else None,
    ),
    "micro-batches for pads": (pads, "_add_levels", lambda costs, cut, size: None),
}
"""Step -> where it is, and what stands in its place."""

Batch = tuple[Rows, Job, Update]


def batches(number: int) -> Iterator[Batch]:
    """Random jobs, each with as many mini-batches as its prompts fill."""
    for place, job in enumerate(random_jobs(number)):
        update = Update(
            dp_size=job.dp_size,
            token_budget=job.token_budget,
            prompts_per_mini_batch=1,
            sync_point="micro_batch" if place % SYNCHRONIZE_ONCE else "mini_batch",
        )
        shape = Job(
            strategy="rows",
            prompts=min(max(round(len(job.tokens_R) / job.mini_batch_rows), 1), len(job.tokens_R)),
            sessions_per_prompt=1,
            updates={"actor": update},
            inference={},
            packer="plan",
            pad_tokens=PAD_TOKENS,
        )
        yield Rows.from_keys([row_key(str(row), 0, 0) for row in range(len(job.tokens_R))], job.tokens_R), shape, update


def time_of_plan(batch: Batch) -> int:
    """What the search minimizes, counted from the plan's own layout."""
    rows, job, update = batch
    layout, costs = plan_batch(rows, job).layouts["actor"], costs_of(rows, job, update)
    return layout_time(layout, costs)


def planned(jobs: Sequence[Batch]) -> tuple[list[int], float]:
    """Time of each plan, and the seconds that planning took."""
    started = time.process_time()
    times = [time_of_plan(batch) for batch in jobs]
    return times, time.process_time() - started


def main(
    jobs: Annotated[int, typer.Option(min=1, help="Random jobs.")] = 200, keep: Keep = False, as_json: AsJson = False
) -> None:
    """Plans the jobs with all steps, and without each in turn."""
    made = list(batches(jobs))
    whole, seconds = planned(made)
    figures = []
    for name, (place, attribute, instead) in STEPS.items():
        with ExitStack() as taken_out:
            taken_out.enter_context(mock.patch.object(place, attribute, instead))
            without, seconds_without = planned(made)
        longer = [100 * (after / before - 1) for before, after in zip(whole, without, strict=True)]
        figures.append(
            {
                "step": name,
                "median": median(longer),
                "mean": fmean(longer),
                "worst": max(longer),
                "best": min(longer),
                "changed": sum(value != 0 for value in longer),
                "planning_time": seconds_without / seconds,
            }
        )
    show(
        f"a plan without this step takes longer by, in %, on {jobs} random jobs",
        ["step", "median", "mean", "worst", "best", "plans changed", "planning time"],
        [[line[key] for key in line] for line in figures],
    )
    report({"jobs": jobs, "steps": figures}, benchmark=__file__, keep=keep, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
