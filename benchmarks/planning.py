"""How long planning takes: verl's balancing and packing, and the plan.

    python -m benchmarks.planning [--large] [--keep] [--json]

- A batch: verl's ``get_seqlen_balanced_partitions`` as its trainer calls it, with a tensor, against the plan's
  mini-batches and ranks (``padding.packer=verl``), and against the whole plan with the micro-batches of four passes
  (``padding.packer=plan``). 8,192 rows on 64 ranks; ``--large`` adds 131,072 on 512, some minutes.
- A cell of 1,024 rows: verl's ``rearrange_micro_batches``, which packs anew with one micro-batch more until all fit,
  first-fit-decreasing, and the plan for one rank.
- With ``padding.sharing=trees``, rows of agents whose reasoning is left out of later prompts, in 1 to 64 mini-batches;
  as many rows and ranks as of the largest batch.
"""

from __future__ import annotations

import time
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
from verl_padding.plan.forest import Forest
from verl_padding.plan.packing.bins import first_fit
from verl_padding.plan.row_keys import row_key

BUDGET = 16384
REPEATS = 5
STEPS = 4


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


def thinking_rows(n_rows: int) -> tuple[Rows, int]:
    """Rows of sessions of some eight model calls whose reasoning is left out of later prompts, eight sessions a prompt;
    and the number of prompts."""
    draw = np.random.default_rng(0)
    keys: list[str] = []
    tokens: list[int] = []
    order: list[int] = []
    shared: list[int] = []
    prompts = 0
    while len(tokens) < n_rows:
        first = int(draw.integers(200, 800))
        for session in range(8):
            context, begins = first, len(tokens)
            read: list[int] = []
            for call in range(max(1, round(8 * draw.lognormal(-0.125, 0.5)))):
                thought, answer = int(draw.integers(100, 600)), int(draw.integers(50, 300))
                if context + thought + answer > BUDGET:
                    break
                keys.append(row_key(f"p{prompts}", session, call))
                tokens.append(context + thought + answer)
                read.append(context)
                context += answer + int(draw.integers(20, 300))
            # The longest first; a call shares what it has read with the next one, and the prompt with other sessions.
            order += reversed(range(begins, len(tokens)))
            shared += [first if session else 0, *read[:-1][::-1]]
        prompts += 1
    return Rows.from_keys(keys, tokens, forest=Forest.in_order(tokens, order, shared)), prompts


def trees(n_rows: int, ranks: int) -> list[dict[str, Any]]:
    """Seconds of the plan of an update and its pass with ``padding.sharing=trees``, by mini-batches."""
    rows, prompts = thinking_rows(n_rows)
    figures = []
    for steps in (1, 4, 16, 64):
        update = Update(dp_size=ranks, token_budget=BUDGET, prompts_per_mini_batch=prompts // steps)
        job = Job(
            strategy="prompt",
            prompts=prompts // steps * steps,
            sessions_per_prompt=8,
            updates={"actor": update},
            inference={"log_prob": Pass(dp_size=ranks, token_budget=BUDGET, as_update="actor")},
            packer="plan",
            sharing="trees",
        )
        started = time.process_time()
        planned = plan_batch(rows, job).figures["actor"]
        figures.append(
            {
                "rows": len(rows),
                "ranks": ranks,
                "mini_batches": steps,
                "cpu_seconds": time.process_time() - started,
                "sharing_factor": planned.sharing_factor,
                "over_bound": planned.micro_over_lower_bound,
            }
        )
    names = ("mini_batches", "cpu_seconds", "sharing_factor", "over_bound")
    title = f"trees: {len(rows):,} rows of thinking agents, {ranks} ranks"
    show(title, [name.replace("_", " ") for name in names], [[each[name] for name in names] for each in figures])
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
    figures = {"batches": batches, "cells": cells, "trees": trees(131072, 512) if large else trees(8192, 64)}
    report(figures, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
