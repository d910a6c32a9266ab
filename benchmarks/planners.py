"""The plan beside another planner that shares prefixes, on the same rows: TRL's.

    python3.12 -m venv planners && planners/bin/pip install -e ".[cpu]" trl==1.16.0
    planners/bin/python -m benchmarks.planners [--keep]

Three batches of 256 rows for eight ranks, micro-batches of 16,384 tokens. TRL's
``TokenBudgetBatcher`` is called as its package has it, without a model: it gets the rows as a
stream, and the micro-batch that it does not fill is left out. Both are counted by one cost.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import typer

from benchmarks.one_gpu import rows
from benchmarks.results import Keep, busy_cores, report
from verl_padding.plan import Rows, plan_batch
from verl_padding.plan.cost import Int64s, attention_cost
from verl_padding.plan.prefix_tries import PrefixTries, cached_tokens
from verl_padding.plan.row_keys import uid_of_key

BATCHES, RANKS, BUDGET, VOCABULARY = 3, 8, 16_384, 32_000
PAD = np.array([1, 1])

MicroSteps = list[list[list[Int64s]]]
"""Token ids of the rows of each rank, micro-step by micro-step."""


def main(keep: Keep = False) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    draw, scale = random.Random(0), {"scale": 1.0, "vocabulary": VOCABULARY}
    makers = {
        "8 turns, reasoning left out": partial(rows.sessions, draw, 16, turns=8, **scale),
        "8 turns, each extends the last": partial(
            rows.sessions, draw, 16, turns=8, grows=True, **scale
        ),
        "8 rollouts of a prompt": partial(rows.rollouts, draw, 32, 8, **scale),
    }
    busy, cases = busy_cores(), {}
    for name, make in makers.items():
        batches = [make() for _ in range(BATCHES)]
        planned = [plan(batch) for batch in batches]
        cases[name] = {
            "verl_padding": figures(
                [step for steps, _ in planned for step in steps],
                sum(seconds for _, seconds in planned),
            ),
            "TRL": figures(*plan_by_trl(batches)),
        }
    report("planners", {"planners": {"trl": version("trl")}, "cases": cases}, keep=keep, busy=busy)


def plan(batch: rows.Texts) -> tuple[MicroSteps, float]:
    """The micro-batches of the plan, one mini-batch of all prompts, and its seconds."""
    ids_R = ids_of(batch)
    begun = time.perf_counter()
    uids = [uid_of_key(key) for key in batch]
    tries = PrefixTries.from_tokens(ids_R)
    prompts = len(set(uids))
    job = rows.job_of(
        prompts=prompts,
        sessions=len(batch),
        mini_prompts=prompts,
        ranks=RANKS,
        budget=BUDGET,
        packer="plan",
        sharing="on",
    )
    found = plan_batch(Rows.from_keys(list(batch), tries.tokens_R.tolist(), tries), job)
    seconds = time.perf_counter() - begun
    layout = found.layouts["actor"]
    steps = [
        [[ids_R[row] if row < len(ids_R) else PAD for row in cell] for cell in step]
        for step in zip(*layout.rows_MDK[0], strict=True)
    ]
    return steps, seconds


def plan_by_trl(batches: Sequence[rows.Texts]) -> tuple[MicroSteps, float]:
    """The micro-batches of TRL's planner for asynchronous GRPO, and its seconds."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    samples = []
    for number, batch in enumerate(batches):
        for key, (prompt, response) in batch.items():
            ids, mask = torch.tensor(prompt + response), torch.zeros(len(prompt + response))
            mask[len(prompt) :] = 1
            group = f"{number}_{uid_of_key(key)}"
            samples.append({"input_ids": ids, "completion_mask": mask, "group_id": group})
    begun = time.perf_counter()
    steps = list(TokenBudgetBatcher(samples, RANKS, BUDGET, {"batch/dropped_oversize_total": []}))
    seconds = time.perf_counter() - begun
    return [
        [[sample["input_ids"].numpy() for sample in row.samples] for row in step] for step in steps
    ], seconds


def figures(steps: MicroSteps, seconds: float) -> dict[str, Any]:
    """What is computed, how evenly over ranks, and the time of planning."""
    tokens = sum(len(ids) for step in steps for cell in step for ids in cell)
    cell_figures = np.array([[computed(cell) for cell in step] for step in steps])
    computed_tokens, cost_DK = cell_figures[..., 0].sum(), cell_figures[..., 1]
    return {
        "sharing_factor": tokens / computed_tokens,
        "micro_steps": len(steps),
        "full": computed_tokens / (len(steps) * RANKS * BUDGET),
        "waiting_each_micro_step": 1 - cost_DK.mean() * len(steps) / cost_DK.max(1).sum(),
        "waiting_over_all": 1 - cost_DK.sum(0).mean() / cost_DK.sum(0).max(),
        "us_a_token": 1e6 * seconds / tokens,
    }


def computed(cell: Sequence[Int64s]) -> tuple[int, int]:
    """Tokens that are computed of some rows, and their cost."""
    tries = PrefixTries.from_tokens(cell)
    start_R = cached_tokens(tries.shared_R, tries.tokens_R)
    cost = attention_cost(tries.tokens_R) - attention_cost(start_R)
    return int((tries.tokens_R - start_R).sum()), int(cost.sum())


def ids_of(batch: rows.Texts) -> list[Int64s]:
    return [np.array(prompt + response, dtype=np.int64) for prompt, response in batch.values()]


if __name__ == "__main__":
    typer.run(main)
