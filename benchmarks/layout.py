"""How much longer than need be the slowest ranks take: verl's layout, by its own functions, and the
plan, at verl's number of optimizer steps.

    python -m benchmarks.layout [--keep]

Time is counted by verl's cost of a row (24576 L + L^2), pads included: per mini-batch, the slowest
rank of each; per micro-batch, the slowest rank of each, for ranks that meet there, as FSDP's do.
Five jobs are relative to the real rows' cost shared out evenly, which no layout can beat: in each
mini-batch or micro-batch, the slowest rank costs at least the mean of the ranks. ``plan`` cuts the
micro-batches (``padding.packer=plan``), ``plan+verl`` leaves them to verl's packer.

On 200 random jobs, verl's time is relative to the plan's. A step with a long row takes what that
row takes, and it is luck which rows share a step: so the plan may be slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import typer

from benchmarks.one_gpu.rows import job_of
from benchmarks.results import Keep, report
from benchmarks.stock_layout import pack_as_verl, pad_tokens_of_verl, verl_layout
from verl_padding.plan import COST_MODELS, Rows, plan_batch
from verl_padding.plan.layout import RowsMDK
from verl_padding.plan.row_keys import row_key

RANDOM_JOBS = 200
SHORTEST, LONGEST = 16, 131072
MAX_ROWS = 4096
"""Rows of a random batch by verl's count, about: what verl's functions lay out in seconds."""
ROUNDING = 1e-3
"""Part of a step that is no difference: packers stop that close to each other."""
PAD_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Rows of one training step, and how they are to be trained."""

    tokens_R: list[int]
    """Tokens of each row, prompt and response."""
    dp_size: int
    mini_batch_rows: int
    """Rows of a mini-batch by verl's count: ppo_mini_batch_size x rollout.n; a multiple of
    ``dp_size``."""
    token_budget: int
    """Tokens of a micro-batch on one rank."""


def five_jobs() -> Iterator[BatchJob]:
    """Lognormal row lengths, drawn one job after the other from one generator."""
    rng = np.random.default_rng(0)
    for rows, ranks, mini_batch_rows, middle, sigma, longest, budget in (
        (1100, 8, 256, 1500, 0.9, 16384, 16384),
        (1100, 8, 256, 1500, 0.9, 16384, 32768),
        (3509, 8, 640, 800, 0.8, 8192, 16384),
        (700, 16, 128, 4000, 1.0, 32768, 32768),
        (361, 2, 120, 300, 0.8, 2048, 4096),
    ):
        yield BatchJob(
            tokens_R=clipped(rng.lognormal(np.log(middle), sigma, rows), longest),
            dp_size=ranks,
            mini_batch_rows=mini_batch_rows,
            token_budget=budget,
        )


def random_jobs() -> Iterator[BatchJob]:
    """Jobs of 2 to 512 ranks, 1 to 40 rows a prompt, rows of up to 128k tokens, budgets of 1 to 8
    longest rows."""
    rng = np.random.default_rng(1)
    mixes = (lognormal, turns, two_kinds, even)
    for index in range(RANDOM_JOBS):
        ranks = int(2 ** rng.integers(1, 10))
        steps = int(rng.integers(1, 5))
        # Rows that a prompt should have, and has: verl counts in the former.
        sessions, most_rows = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        most = min(80, max(5, MAX_ROWS // (ranks * steps)))
        rows_of_rank = int(np.exp(rng.uniform(np.log(4), np.log(most))))
        mini_prompts = -(-ranks * rows_of_rank // sessions)
        tokens: list[int] = []
        for _ in range(mini_prompts * steps * sessions):
            drawn = mixes[index % len(mixes)](rng, int(rng.integers(1, most_rows + 1)))
            tokens += clipped(drawn, LONGEST)
        yield BatchJob(
            tokens_R=tokens,
            dp_size=ranks,
            mini_batch_rows=-(-mini_prompts * sessions // ranks) * ranks,
            token_budget=int(max(tokens) * rng.choice([1, 1.5, 2, 4, 8])),
        )


def lognormal(rng, rows):
    return rng.lognormal(np.log(2000), 1.0, rows)


def turns(rng, rows):
    """One row a turn: each holds the turns before it."""
    return np.cumsum(rng.lognormal(np.log(1500), 0.8, rows))


def two_kinds(rng, rows):
    """Short answers, and one in twenty that reasons for tens of thousands of tokens."""
    long = rng.random(rows) < 0.05
    return np.where(long, rng.uniform(16384, LONGEST, rows), rng.lognormal(np.log(800), 0.5, rows))


def even(rng, rows):
    return rng.uniform(200, 8000, rows)


def clipped(lengths, longest):
    return [int(length) for length in np.clip(lengths, SHORTEST, longest)]


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
    """verl's local mini-batches, cut into micro-batches by its packer."""
    rows_MDK = verl_layout(**vars(job))
    # Pads are numbered behind the rows, and fewer than those of a mini-batch.
    return slowest(rows_MDK, [*job.tokens_R, *[pad_tokens_of_verl()] * job.mini_batch_rows])


def planned(job: BatchJob, packer: str) -> tuple[float, float]:
    """The plan, which cuts as many steps as verl's padded rows fill, in the order of the rows."""
    keys = [row_key(str(row), 0, 0) for row in range(len(job.tokens_R))]
    shape = job_of(
        strategy="rows",
        prompts=-(-len(job.tokens_R) // job.mini_batch_rows),
        sessions=1,
        mini_prompts=1,
        ranks=job.dp_size,
        budget=job.token_budget,
        packer=packer,
        pad_tokens=PAD_TOKENS,
    )
    layout = plan_batch(Rows.from_keys(keys, job.tokens_R), shape).layouts["actor"]
    tokens = [*job.tokens_R, *[PAD_TOKENS] * layout.n_pads]
    if packer == "plan":
        return slowest(layout.rows_MDK, tokens)
    cut = [pack_as_verl(local_D, tokens, job.token_budget) for local_D in layout.local_batches]
    return slowest(cut, tokens)


def five_figures(job: BatchJob) -> dict[str, Any]:
    """Each layout of a job, over the lower bound."""
    bound = costs_of(job.tokens_R).sum() / job.dp_size
    found = {"verl": verl(job), "plan+verl": planned(job, "verl"), "plan": planned(job, "plan")}
    return {
        "job": f"{len(job.tokens_R)} rows, {job.dp_size} ranks, budget {job.token_budget}",
        "per_mini_batch": {name: mini / bound for name, (mini, _) in found.items()},
        "per_micro_batch": {name: micro / bound for name, (_, micro) in found.items()},
    }


def main(keep: Keep = False) -> None:
    """Measures the five jobs and the random ones."""
    gains = defaultdict[str, list[float]](list)
    for job in random_jobs():
        per_mini, per_micro = verl(job)
        gains["per_mini_batch"].append(per_mini / planned(job, "verl")[0])
        gains["per_micro_batch"].append(per_micro / planned(job, "plan")[1])
    record = {
        clock: {
            "verl_over_plan": {"least": min(gain), "median": median(gain), "most": max(gain)},
            "plan_is_slower": int(sum(each < 1 - ROUNDING for each in gain)),
        }
        for clock, gain in gains.items()
    }
    figures = {"five": [*map(five_figures, five_jobs())], "random": record}
    report("layout", figures, keep=keep)


if __name__ == "__main__":
    typer.run(main)
