"""Balance of a batch inside its optimizer steps: verl's own functions beside the planner, on five simulated jobs.

    python -m benchmarks.planner

Lengths are lognormal, clipped to 16 .. longest, drawn in the order of the table from NumPy's default_rng(0). The
figure is the time of the update as synchronous ranks see it, the sum over mini-batches of the slowest rank's cost
(24576 L + L^2), over the lower bound (total cost / dp). verl pads to a multiple of the mini-batch with rows of 128
tokens, balances the whole batch over the ranks and cuts each rank's rows in order; the plan (strategy ``rows``)
takes as many steps, with pads of 2 tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_padding.plan import Job, Rows, Update, plan_batch

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    rows: int
    dp_size: int
    mini_batch_rows: int
    median: int
    sigma: float
    longest: int
    budget: int


JOBS = [
    SimulatedJob(rows=r, dp_size=d, mini_batch_rows=m, median=med, sigma=s, longest=lo, budget=b)
    for r, d, m, med, s, lo, b in [
        (1100, 8, 256, 1500, 0.9, 16384, 16384),
        (1100, 8, 256, 1500, 0.9, 16384, 32768),
        (3509, 8, 640, 800, 0.8, 8192, 16384),
        (700, 16, 128, 4000, 1.0, 32768, 32768),
        (361, 2, 120, 300, 0.8, 2048, 4096),
    ]
]


def costs_of(lengths: np.ndarray) -> np.ndarray:
    return calculate_workload(torch.as_tensor(lengths, dtype=torch.int64)).numpy().astype(np.float64)


def verl_makespan(job: SimulatedJob, lengths: np.ndarray) -> tuple[float, int]:
    """(makespan, pads) of verl 0.9.1: ``_balance_batch`` and the cut of ``train_mini_batch``."""
    pads = -len(lengths) % job.mini_batch_rows
    padded = np.concatenate([lengths, np.full(pads, SYNTHETIC_PADDING_SEQ_LEN)])
    costs = costs_of(padded)
    ranks = get_seqlen_balanced_partitions(costs.astype(np.int64).tolist(), job.dp_size, equal_size=True)
    size = job.mini_batch_rows // job.dp_size
    steps = len(padded) // job.mini_batch_rows
    cut = [[costs[rank[m * size : (m + 1) * size]].sum() for rank in ranks] for m in range(steps)]
    return float(sum(max(loads) for loads in cut)), pads


def main() -> None:
    rng = np.random.default_rng(0)
    table = Table(title="slowest rank, summed over the optimizer steps, over the lower bound")
    for column in ("rows", "dp", "mini-batch", "verl", "plan", "pads: verl", "pads: plan", "plan, ms (spread)"):
        table.add_column(column, justify="right")
    for job in JOBS:
        drawn = rng.lognormal(np.log(job.median), job.sigma, job.rows)
        lengths = np.clip(drawn, 16, job.longest).astype(np.int64)
        bound = costs_of(lengths).sum() / job.dp_size
        theirs, their_pads = verl_makespan(job, lengths)
        steps = -(-job.rows // job.mini_batch_rows)
        rows = Rows.from_keys([f"p{i}_0_0" for i in range(job.rows)], lengths.tolist())
        update = Update(dp_size=job.dp_size, token_budget=job.budget, prompts_per_mini_batch=1)
        shape = Job(strategy="rows", prompts=steps, sessions_per_prompt=1, updates={"actor": update}, inference={})
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            plan = plan_batch(rows, shape)
            seconds.append(time.perf_counter() - started)
        layout = plan.layouts["actor"]
        tokens = np.concatenate([lengths, np.full(plan.n_pads, 2)])
        costs = costs_of(tokens)
        ours = sum(max(costs[list(cell)].sum() for cell in ranks) for ranks in layout.cells)
        table.add_row(
            f"{job.rows}",
            f"{job.dp_size}",
            f"{job.mini_batch_rows}",
            f"{theirs / bound:.3f}",
            f"{ours / bound:.3f}",
            f"{their_pads}",
            f"{plan.n_pads}",
            f"{1e3 * np.median(seconds):.0f} ({1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
