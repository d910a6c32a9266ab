"""How long planning takes: verl's balancing and packing, and the plan.

    python -m benchmarks.planning [--large] [--keep] [--json]

- A batch: verl's ``get_seqlen_balanced_partitions`` as its trainer calls it, with a tensor, against the plan's
  mini-batches and ranks (``padding.packer=verl``), and against the whole plan with the micro-batches of four passes
  (``padding.packer=plan``). 8,192 rows on 64 ranks; ``--large`` adds 131,072 on 512, some minutes.
- A cell of 1,024 rows: verl's ``rearrange_micro_batches``, which packs anew with one micro-batch more until all fit,
  first-fit-decreasing, and the plan for one rank.
- The whole plan for ever more rows: seconds over n log n should not grow.
"""

from __future__ import annotations

from math import log2
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tensordict import TensorDict
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

from benchmarks.results import AsJson, Keep, busy_cores, console, report, seconds_of, show, spread
from verl_padding.plan import BatchPlan, Job, Packer, Pass, Rows, Update, plan_batch
from verl_padding.plan.packing.bins import first_fit
from verl_padding.plan.row_keys import row_key

BUDGET = 16384
REPEATS = 5
STEPS = 4
SIZES = tuple(2**exponent for exponent in range(10, 21))


def lognormal_tokens(rows: int, sigma: float = 0.9) -> list[int]:
    """Row lengths of median 1500, the longest as long as the token budget."""
    lengths = np.random.default_rng(0).lognormal(np.log(1500), sigma, rows)
    return np.clip(lengths, 16, BUDGET).astype(int).tolist()


def rows_of(tokens_R: list[int]) -> Rows:
    return Rows.from_keys([row_key(str(row), 0, 0) for row in range(len(tokens_R))], tokens_R)


def plan(rows: Rows, ranks: int, packer: Packer, *, passes: bool = True, steps: int = STEPS) -> BatchPlan:
    """The plan of an update, and of log-probs, reference and values at their own budgets."""
    update = Update(dp_size=ranks, token_budget=BUDGET, prompts_per_mini_batch=1)
    budgets = {"log_prob": 2 * BUDGET, "ref": 2 * BUDGET, "values": BUDGET} if passes else {}
    job = Job(
        strategy="rows",
        prompts=steps,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={name: Pass(dp_size=ranks, token_budget=budget) for name, budget in budgets.items()},
        packer=packer,
    )
    return plan_batch(rows, job)


def a_batch(n_rows: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds of verl's balancing, of the cells of the plan, and of the whole plan; the sides take turns."""
    tokens_R = lognormal_tokens(n_rows)
    rows, workload = rows_of(tokens_R), calculate_workload(torch.tensor(tokens_R))
    sides = {
        "verl": lambda: get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True),
        "verl, given a list": lambda: get_seqlen_balanced_partitions(workload.tolist(), ranks, equal_size=True),
        "cells": lambda: plan(rows, ranks, "verl"),
        "whole plan": lambda: plan(rows, ranks, "plan"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name] += seconds_of(side, 1)
    figures = plan(rows, ranks, "plan").figures["actor"]
    show(
        f"{n_rows:,} rows, {ranks} ranks: seconds (median, least to most)",
        ["side", "seconds", "over verl's median"],
        [[name, spread(taken), median(taken) / median(seconds["verl"])] for name, taken in seconds.items()],
    )
    console.print(f"the plan's micro-batches: {figures.micro_over_lower_bound:.4f} over the lower bound\n")
    return {"rows": n_rows, "ranks": ranks, "seconds": seconds}


def a_cell(n_rows: int, sigma: float) -> dict[str, Any]:
    """Seconds and micro-batches of verl's packer, first-fit-decreasing and the plan on one rank's rows."""
    tokens_R = lognormal_tokens(n_rows, sigma)
    offsets = torch.tensor([0, *np.cumsum(tokens_R).tolist()])
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int8), offsets)
    cell = TensorDict({"input_ids": ids}, batch_size=n_rows)
    packed: list[int] = []
    verl = seconds_of(lambda: packed.append(len(rearrange_micro_batches(cell, max_token_len=max(tokens_R))[0])), 1)
    rows = rows_of(tokens_R)
    ours = seconds_of(lambda: plan(rows, 1, "plan", passes=False, steps=1), REPEATS)
    micro_batches = plan(rows, 1, "plan", passes=False, steps=1).layouts["actor"].n_micro_batches
    longest_first = sorted(tokens_R, reverse=True)
    first_fit_bins = len(first_fit(longest_first, longest_first, BUDGET))
    show(
        f"a cell of {n_rows:,} rows, sigma {sigma}",
        ["side", "seconds", "micro-batches"],
        [
            ["verl", spread(verl), packed[0]],
            ["first-fit-decreasing", "", first_fit_bins],
            ["plan", spread(ours), micro_batches],
            ["verl / plan", median(verl) / median(ours), ""],
        ],
    )
    counts = {"verl": packed[0], "first_fit_decreasing": first_fit_bins, "plan": micro_batches}
    return {"rows": n_rows, "sigma": sigma, "seconds": {"verl": verl, "plan": ours}, "micro_batches": counts}


def growth() -> list[dict[str, Any]]:
    """Seconds of the whole plan of an update, 128 rows a rank up to 512 ranks."""
    figures = []
    for n_rows in SIZES:
        ranks = min(n_rows // 128, 512)
        rows = rows_of(lognormal_tokens(n_rows))
        cells, whole = (
            seconds_of(lambda packer=packer, rows=rows, ranks=ranks: plan(rows, ranks, packer, passes=False), 1)[0]
            for packer in ("verl", "plan")
        )
        figures.append({"rows": n_rows, "ranks": ranks, "cells": cells, "whole_plan": whole})
    show(
        "one update of four mini-batches: seconds, and millionths of a second over n log2 n",
        ["rows", "ranks", "cells", "whole plan", "cells / n log n", "whole plan / n log n"],
        [
            [f"{it['rows']:,}", it["ranks"], it["cells"], it["whole_plan"]]
            + [1e6 * it[side] / (it["rows"] * log2(it["rows"])) for side in ("cells", "whole_plan")]
            for it in figures
        ],
    )
    return figures


def main(
    large: Annotated[bool, typer.Option("--large", help="131,072 rows on 512 ranks as well.")] = False,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures all of it."""
    busy = busy_cores()
    batches = [a_batch(8192, 64, REPEATS)]
    if large:
        batches.append(a_batch(131072, 512, 3))
    cells = [a_cell(1024, 0.6), a_cell(1024, 1.0)]
    figures = {"batches": batches, "cells": cells, "growth": growth()}
    report(figures, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
