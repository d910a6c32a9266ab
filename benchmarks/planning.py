"""How long planning takes: verl's balancing, and the plan.

    python -m benchmarks.planning [--keep]

- A batch: verl's ``get_seqlen_balanced_partitions`` as its trainer calls it, with a tensor; the
  plan's cells (``padding.packer=verl``); and the whole plan with the micro-batches of four calls
  (``padding.packer=plan``). 8,192 rows on 64 ranks, and 131,072 on 512, some minutes.
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
from verl_padding.plan import Packer, Pass, Rows, plan_batch
from verl_padding.plan.row_keys import row_key

BUDGET = 16384


def lognormal_rows(n_rows: int) -> Rows:
    """Row lengths of median 1500, the longest as long as the token budget."""
    lengths = np.random.default_rng(0).lognormal(np.log(1500), 0.9, n_rows)
    tokens_R = np.clip(lengths, 16, BUDGET).astype(int).tolist()
    return Rows.from_keys([row_key(str(row), 0, 0) for row in range(n_rows)], tokens_R)


def plan(rows: Rows, ranks: int, packer: Packer) -> None:
    """The plan of an update, and of log-probs, reference and values at their own budgets."""
    budgets = {"log_prob": 2 * BUDGET, "ref": 2 * BUDGET, "values": BUDGET}
    job = job_of(
        strategy="rows",
        prompts=4,
        sessions=1,
        mini_prompts=1,
        ranks=ranks,
        budget=BUDGET,
        packer=packer,
    )
    passes = {name: Pass(dp_size=ranks, token_budget=size) for name, size in budgets.items()}
    plan_batch(rows, replace(job, inference=passes))


def a_batch(n_rows: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds of verl's balancing, of the cells of the plan, and of the whole plan; the sides take
    turns."""
    rows = lognormal_rows(n_rows)
    workload = calculate_workload(torch.tensor(rows.tokens_R))
    sides = {
        "verl": partial(
            get_seqlen_balanced_partitions, workload, k_partitions=ranks, equal_size=True
        ),
        "cells": partial(plan, rows, ranks, "verl"),
        "whole plan": partial(plan, rows, ranks, "plan"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name].append(timed(side, on_gpu=False)[1])
    return {"rows": n_rows, "ranks": ranks, "seconds": seconds}


def main(keep: Keep = False) -> None:
    """Measures all of it."""
    busy = busy_cores()
    figures = {
        "batches": [a_batch(8192, 64, 5), a_batch(131072, 512, 3)],
    }
    report("planning", figures, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
