"""How long planning takes, beside verl's balancing.

    python -m benchmarks.planning [--keep]

verl's ``get_seqlen_balanced_partitions`` as its trainer calls it, with a tensor, and the plan with
the micro-batches of four calls (``padding.packer=plan``); the sides take turns. 8,192 rows on 64
ranks, and 131,072 on 512, some minutes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import typer
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.one_gpu.figures import timed
from benchmarks.one_gpu.rows import job_of
from benchmarks.results import Keep, busy_cores, report
from verl_padding.plan import Pass, Rows, plan_batch
from verl_padding.plan.row_keys import row_key

BUDGET = 16384


def lognormal_rows(n_rows: int) -> Rows:
    """Row lengths of median 1500, the longest as long as the token budget."""
    lengths = np.random.default_rng(0).lognormal(np.log(1500), 0.9, n_rows)
    tokens_R = np.clip(lengths, 16, BUDGET).astype(int).tolist()
    return Rows.from_keys([row_key(str(row), 0, 0) for row in range(n_rows)], tokens_R)


def a_batch(n_rows: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds of verl's balancing, and of the plan of an update, log-probs, reference and values at
    their own budgets."""
    rows = lognormal_rows(n_rows)
    workload = calculate_workload(torch.tensor(rows.tokens_R))
    budgets = {"log_prob": 2 * BUDGET, "ref": 2 * BUDGET, "values": BUDGET}
    job = job_of(
        strategy="rows",
        prompts=4,
        sessions=1,
        mini_prompts=1,
        ranks=ranks,
        budget=BUDGET,
        packer="plan",
    )
    passes = {name: Pass(dp_size=ranks, token_budget=size) for name, size in budgets.items()}
    sides = {
        "verl": partial(get_seqlen_balanced_partitions, workload, ranks, equal_size=True),
        "plan": partial(plan_batch, rows, replace(job, inference=passes)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name].append(timed(side, on_gpu=False)[1])
    return {"rows": n_rows, "ranks": ranks, "seconds": seconds}


def main(keep: Keep = False) -> None:
    """Measures both batches."""
    busy = busy_cores()
    figures = {"batches": [a_batch(8192, 64, 5), a_batch(131072, 512, 3)]}
    report("planning", figures, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
