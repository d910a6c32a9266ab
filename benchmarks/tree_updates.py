"""What trees save: real updates of two FSDP2 ranks on rows that begin alike and part.

    python -m benchmarks.tree_updates [--keep] [--json]

*Cases*: sessions of 2, 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is left out of later
prompts, as templates of thinking models do; eight rollouts of each prompt, one row a session; and rows that share
nothing. As many rows as have ``COMPUTED_TOKENS`` that are unlike.

*Sides*: stock verl twice, with transformers' attention, which computes all pairs of tokens of a micro-batch on a CPU,
and with the attention of ``+local=cpu``, row by row; and, with the latter, ``+padding=prompt padding.packer=plan`` with
``padding.sharing`` off, chains and trees. A Qwen2 of two layers, wide enough that most of what a token takes is linear
layers; verl's own worker, engine and loss. All sides take turns in one job, in one order and the other, each from the
model's weights, on the same rows, put anew.

What is compared is CPU seconds of both ranks in the update: ranks that wait, and other work on the machine, count
little. Seconds on the clock, those before the update (rows are compared, the plan is made) and the largest resident set
of a rank stand beside them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from tensordict import TensorDict

from benchmarks.attention import use_row_attention, use_transformers_attention
from benchmarks.results import AsJson, Keep, busy_cores, console, report, show, spread
from benchmarks.sharing import BUDGET, HIDDEN, Grown, number_of_turns, put_batch, random_tokens
from benchmarks.train_step import (
    RANKS,
    Side,
    StepSize,
    make_model,
    peak_of,
    planned_update,
    start_peak,
    start_side,
    stock_update,
)
from tests.support.cluster import ray_and_queue
from verl_padding.plan.row_keys import row_key

COMPUTED_TOKENS = RANKS * 2 * BUDGET
SESSIONS = 8
ALL_PAIRS, STOCK = Side(name="stock verl, all pairs", strategy=None), Side(name="stock verl", strategy=None)
OFF = Side(name="off", strategy="prompt", packer="plan")
CHAINS, TREES = replace(OFF, name="chains", sharing="chains"), replace(OFF, name="trees", sharing="trees")
SIDES = (ALL_PAIRS, STOCK, OFF, CHAINS, TREES)


def thinking_session(turns: int, draw: random.Random, first: list[int], prompt: str, session: int) -> tuple[Grown, int]:
    """Rows of a session whose reasoning is left out of later prompts, and how many of their tokens are unlike."""
    rows: Grown = []
    context, unlike = list(first), 0
    for turn in range(number_of_turns(draw, turns)):
        thought, answer = random_tokens(draw, 10, 60), random_tokens(draw, 10, 45)
        if len(context) + len(thought) + len(answer) > BUDGET:
            break
        rows.append((row_key(prompt, session, turn), list(context), thought + answer))
        told = answer + random_tokens(draw, 10, 30)
        context += told
        unlike += len(thought) + len(answer) + len(told)
    return rows, unlike


def rollout(draw: random.Random, first: list[int], prompt: str, session: int) -> tuple[Grown, int]:
    """The one row of a session."""
    answer = random_tokens(draw, 60, 140)
    return [(row_key(prompt, session, 0), list(first), answer)], len(answer)


def alone(draw: random.Random, first: list[int], prompt: str, session: int) -> tuple[Grown, int]:
    """A row whose prompt is its own."""
    own = random_tokens(draw, 100, 300)
    rows, unlike = rollout(draw, own, prompt, session)
    return rows, unlike + len(own)


Session = Callable[[random.Random, list[int], str, int], tuple[Grown, int]]
CASES: dict[str, tuple[Session, tuple[int, int]]] = {
    **{f"{turns} turns that think": (partial(thinking_session, turns), (20, 60)) for turns in (2, 4, 8)},
    "8 rollouts of a prompt": (rollout, (300, 500)),
    "nothing to share": (alone, (1, 1)),
}
"""How a session is drawn, and the least and the most tokens of a prompt."""


def drawn_rows(case: str) -> tuple[Grown, StepSize]:
    """The rows of an update of one mini-batch: as many prompts of eight sessions as have ``COMPUTED_TOKENS``."""
    session, (least, most) = CASES[case]
    draw = random.Random(case)
    rows: Grown = []
    prompts = unlike = 0
    while unlike < COMPUTED_TOKENS:
        first = random_tokens(draw, least, most)
        unlike += len(first)
        for number in range(SESSIONS):
            of_session, its_own = session(draw, first, f"p{prompts}", number)
            rows += of_session
            unlike += its_own
        prompts += 1
    return rows, StepSize(prompts=prompts, sessions=SESSIONS, mini_prompts=prompts, budget=BUDGET)


def cpu_seconds(workers: Any) -> float:
    """CPU seconds of all ranks since they were started."""
    from verl.protocol import DataProto

    def read(worker: Any) -> Any:
        import time

        taken = torch.tensor([time.process_time()], dtype=torch.float64)
        return DataProto(batch=TensorDict({"seconds": taken}, batch_size=1))

    return float(workers.execute_with_func_generator(read).batch["seconds"].sum())


def measure(repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each round of each side took, by turns."""
    record: dict[str, dict[str, list[dict[str, Any]]]] = {case: {side.name: [] for side in SIDES} for case in CASES}
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from tests.support.fsdp2_workers import start_actor, stop
        from verl_padding.worker.losses import wrap_worker_loss
        from verl_padding.worker.plan_packer import install

        model = make_model(Path(folder), HIDDEN, BUDGET)
        workers = start_actor(model, RANKS, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}")
        workers.execute_with_func_generator(wrap_worker_loss("rows"))
        for case in CASES:
            rows, size = drawn_rows(case)
            for number in track(range(repeats + 1), case, console=console):
                for side in SIDES if number % 2 else reversed(SIDES):
                    start_side(workers, side)
                    attention = use_transformers_attention if side is ALL_PAIRS else use_row_attention
                    workers.execute_with_func_generator(attention)
                    workers.execute_with_func_generator(install(side.sharing))  # trees wrap the attention
                    batch = put_batch(rows)
                    start_peak(workers)
                    before = cpu_seconds(workers)
                    took: dict[str, Any] = (
                        stock_update(workers, batch, size)
                        if side.strategy is None
                        else planned_update(workers, batch, side, size)
                    )
                    took["cpu"] = cpu_seconds(workers) - before
                    took["memory_gib"] = peak_of(workers) / 2**30
                    took["rows"] = len(rows)
                    if number:  # the first round warms up
                        record[case][side.name].append(took)
        stop(workers)
    return record


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all sides.")] = 3,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures the updates of all cases."""
    busy = busy_cores()
    record = measure(repeats)
    lines, ratios = [], {}
    for case, sides in record.items():
        trees, factor = sides[TREES.name], sides[TREES.name][0]["sharing_factor"]
        over = {
            name: [theirs["cpu"] / its["cpu"] for theirs, its in zip(took, trees, strict=True)]
            for name, took in sides.items()
        }
        ratios[case] = {"sharing_factor": factor, "over_trees": over, "of_factor": median(over[OFF.name]) / factor}
        for name, took in sides.items():
            lines.append(
                [
                    f"{case}, {took[0]['rows']} rows: {name}",
                    took[0]["steps"],
                    took[0].get("sharing_factor", 1.0),
                    spread([it["before"] for it in took], 2),
                    spread([it["update"] for it in took], 2),
                    spread([it["cpu"] for it in took], 2),
                    spread(over[name], 2),
                    median(it["memory_gib"] for it in took),
                ]
            )
    columns = ["side", "steps", "sharing factor", "before", "update", "CPU", "CPU / CPU of trees", "GiB"]
    show("seconds of an update and before it, median (least-most)", columns, lines)
    report({"sides": record, "ratios": ratios}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
