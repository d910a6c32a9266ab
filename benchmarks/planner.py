"""verl's balancing against the planner: how much longer than need be the slowest ranks take.

Run as ``python -m benchmarks.planner``. Five jobs with lognormal row lengths; on verl's side its own functions. Cost
of a step: that of its slowest rank, by verl's cost model, pads included. Lower bound: cost of the real rows over the
number of ranks, which no plan can beat. Both sides take the same number of optimizer steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import lcm
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_padding.plan import BatchPlan, Job, Rows, Update, plan_batch

VERL_PAD_TOKENS = 128
"""Tokens of a pad of verl 0.9."""

SHORTEST = 16
TIMED_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class LognormalJob:
    """A batch of lognormal row lengths, clipped to ``SHORTEST .. longest``."""

    rows: int
    dp_size: int
    mini_batch_rows: int
    median_tokens: int
    sigma: float
    longest: int
    token_budget: int

    def draw_tokens(self, rng: np.random.Generator) -> list[int]:
        lengths = rng.lognormal(np.log(self.median_tokens), self.sigma, self.rows)
        return [int(length) for length in np.clip(lengths, SHORTEST, self.longest)]

    @property
    def padded_rows(self) -> int:
        """Rows after verl's own padding."""
        multiple = lcm(self.dp_size, self.mini_batch_rows)
        return -(-self.rows // multiple) * multiple

    @property
    def steps(self) -> int:
        """Optimizer steps that verl takes."""
        return self.padded_rows // self.mini_batch_rows


def _job(rows: int, dp: int, mini: int, middle: int, sigma: float, longest: int, budget: int) -> LognormalJob:
    return LognormalJob(
        rows=rows,
        dp_size=dp,
        mini_batch_rows=mini,
        median_tokens=middle,
        sigma=sigma,
        longest=longest,
        token_budget=budget,
    )


JOBS = (
    _job(1100, 8, 256, 1500, 0.9, 16384, 16384),
    _job(1100, 8, 256, 1500, 0.9, 16384, 32768),
    _job(3509, 8, 640, 800, 0.8, 8192, 16384),
    _job(700, 16, 128, 4000, 1.0, 32768, 32768),
    _job(361, 2, 120, 300, 0.8, 2048, 4096),
)


def verl_slowest_ranks(tokens_R: list[int], job: LognormalJob) -> int:
    """Cost of the slowest ranks, summed over the steps, as verl 0.9 deals the rows out."""
    padded = tokens_R + [VERL_PAD_TOKENS] * (job.padded_rows - len(tokens_R))
    cost_R: list[int] = calculate_workload(torch.tensor(padded)).tolist()
    chunks = get_seqlen_balanced_partitions(cost_R, k_partitions=job.dp_size, equal_size=True)
    cell = job.mini_batch_rows // job.dp_size
    return sum(
        max(sum(cost_R[row] for row in chunk[step * cell : (step + 1) * cell]) for chunk in chunks)
        for step in range(job.steps)
    )


def planned(tokens_R: list[int], job: LognormalJob) -> tuple[BatchPlan, float]:
    """The plan with as many steps as verl takes, and the median seconds it took."""
    rows = Rows.from_keys([f"{row}_0_0" for row in range(len(tokens_R))], tokens_R)
    update = Update(dp_size=job.dp_size, token_budget=job.token_budget, prompts_per_mini_batch=1)
    shape = Job(strategy="rows", prompts=job.steps, sessions_per_prompt=1, updates={"actor": update}, inference={})
    seconds = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        plan = plan_batch(rows, shape)
        seconds.append(time.perf_counter() - started)
    return plan, median(seconds)


def main() -> None:
    table = Table(title="Slowest ranks over the lower bound (1 is perfect), pads, seconds of planning")
    for column in ("rows", "ranks", "steps", "verl", "planned", "pads of verl", "pads planned", "seconds"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(0)
    for job in JOBS:
        tokens_R = job.draw_tokens(rng)
        bound = int(calculate_workload(torch.tensor(tokens_R)).sum()) / job.dp_size
        plan, seconds = planned(tokens_R, job)
        cost_R = calculate_workload(torch.tensor([*tokens_R, *[2] * plan.n_pads])).tolist()
        slowest = sum(max(sum(cost_R[row] for row in cell) for cell in ranks) for ranks in plan.layouts["actor"].cells)
        table.add_row(
            str(job.rows),
            str(job.dp_size),
            str(job.steps),
            f"{verl_slowest_ranks(tokens_R, job) / bound:.3f}",
            f"{slowest / bound:.3f}",
            str(job.padded_rows - job.rows),
            str(plan.n_pads),
            f"{seconds:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
