"""What shared prefixes save: real updates of two FSDP2 ranks, and plans of many.

    python -m benchmarks.sharing [--keep] [--json]

*Sides*: sessions whose every turn is a row that begins with the whole row before it, of 1, 2, 4, 8 and 16 turns on
average (long-tailed), as many as have ``DISTINCT_TOKENS``. A Qwen2 of two layers, verl's own worker, engine and loss;
stock verl with its trainer's own balancing and pads, ``+padding=prompt padding.packer=plan``, and the same with
``padding.sharing=chains``. The sides take turns, in one order and the other, each from the model's weights, on the same
rows, put anew. What comes before the update (finding out which rows extend each other, planning or balancing, pads) is
given beside it, and ratios are of both together. Memory is the largest resident set of a rank during the update.

The model is wide and its micro-batches are short, so that most of what a token takes is linear layers, as with large
models. torch's attention on a CPU computes all pairs of tokens of a micro-batch, and with a narrow model and long
micro-batches a token would cost by how full its micro-batch is. An update is one mini-batch of at least seven
micro-batches a rank, so that those of all sides are about equally full.

*Plans*: random batches of such sessions on 2 to 512 ranks. The time of the slowest rank of each micro-batch over the
lower bound, the sharing factor, and what a plan that knows nothing of prefixes would take with the same engine, which
then shares what happens to be in one micro-batch.

*Lineage*: 8,192 rows of about 4,000 tokens in TransferQueue; the time to find which rows extend each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import torch
import transfer_queue as tq
import typer
from rich.progress import track
from transfer_queue import KVBatchMeta

from benchmarks.results import AsJson, Keep, busy_cores, console, report, show, spread
from benchmarks.two_ranks import take_turns, two_ranks
from benchmarks.updates import RANKS, Side, StepSize, put_trained, update_of
from tests.support.cluster import ray_and_queue
from verl_padding.plan import Job, Rows, Sharing, Update, plan_batch
from verl_padding.plan.mini_batch_costs import micro_batches_of, mini_batch_costs
from verl_padding.plan.planner import costs_of
from verl_padding.plan.row_keys import row_key

TURNS = (1, 2, 4, 8, 16)
HIDDEN, BUDGET = 512, 1024
PROMPTS = 1
"""Each is a mini-batch."""
DISTINCT_TOKENS = PROMPTS * RANKS * 6 * BUDGET
"""Of an update, without those that rows repeat: six full micro-batches of each rank in each mini-batch."""
STOCK = Side(name="stock verl", strategy=None)
PLAN = Side(name="plan", strategy="prompt", packer="plan")
CHAINS = Side(name="plan with chains", strategy="prompt", packer="plan", sharing="chains")
SIDES = (STOCK, PLAN, CHAINS)
LEAST_SECONDS = 120.0
"""Updates of few rows are short, and need more rounds to be compared."""
SEARCHED_ROWS, SEARCHED_TURNS, SEARCHED_TOKENS = 8192, 8, 4000

Grown = list[tuple[str, list[int], list[int]]]


def grown_rows(turns: int) -> tuple[Grown, StepSize]:
    """Rows of an update: as many sessions of each prompt as have ``DISTINCT_TOKENS`` together."""
    draw = random.Random(turns)
    firsts = [random_tokens(draw, 20, 60) for _ in range(PROMPTS)]
    rows: list[Grown] = [[] for _ in firsts]
    distinct = sessions = 0
    while distinct < DISTINCT_TOKENS or sessions % RANKS:  # stock verl's mini-batches divide by the ranks
        for prompt, first in enumerate(firsts):
            rows[prompt] += _session(draw, turns, first, f"p{prompt}", sessions)
            _, context, answer = rows[prompt][-1]
            distinct += len(context) + len(answer)
        sessions += 1
    in_order = [row for of_prompt in rows for row in of_prompt]
    return in_order, StepSize(prompts=PROMPTS, sessions=sessions, mini_prompts=1, budget=BUDGET)


def _session(draw: random.Random, turns: int, first: list[int], prompt: str, session: int) -> Grown:
    """Key, prompt and response of each row; it goes on until its turns are over or its context is full."""
    rows: Grown = []
    context = list(first)
    for turn in range(number_of_turns(draw, turns)):
        answer = random_tokens(draw, 10, 45)
        if len(context) + len(answer) > BUDGET:
            break
        rows.append((row_key(prompt, session, turn), list(context), answer))
        context += answer + random_tokens(draw, 10, 30)
    return rows


def random_tokens(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(5, 200) for _ in range(draw.randint(least, most))]


def number_of_turns(draw: random.Random, mean: int) -> int:
    """Long-tailed around a mean; always 1 for a mean of 1."""
    return 1 if mean == 1 else max(1, round(mean * draw.lognormvariate(-0.125, 0.5)))


def put_batch(rows: Grown) -> KVBatchMeta:
    """The rows, with all that an actor update reads."""
    from tests.support.rows_in_queue import put_rows

    lengths = [(len(prompt), len(answer)) for _, prompt, answer in rows]
    batch = put_rows(
        lengths,
        [key for key, _, _ in rows],
        prompts=[torch.tensor(prompt) for _, prompt, _ in rows],
        responses=[torch.tensor(answer) for _, _, answer in rows],
        input_ids=[torch.tensor(prompt + answer) for _, prompt, answer in rows],
    )
    return put_trained(batch.keys, [response for _, response in lengths], batch.tags)


def _rounds(repeats: int) -> Iterator[int]:
    """A first round, which is not kept, and then as many as asked for, or more until `LEAST_SECONDS` have passed."""
    started = time.perf_counter()
    number = 0
    while number <= repeats or time.perf_counter() - started < LEAST_SECONDS:
        yield number
        number += 1


def measure_updates(repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each round of each side took, by turns."""
    record = {}
    with two_ranks(HIDDEN, BUDGET) as workers:
        for turns in TURNS:
            rows, size = grown_rows(turns)
            told = {"rows": len(rows), "tokens": sum(len(prompt) + len(answer) for _, prompt, answer in rows)}

            def update(side: Side, rows: Grown = rows, size: StepSize = size, told: Any = told) -> dict[str, Any]:
                return update_of(workers, put_batch(rows), side, size) | told

            record[str(turns)] = take_turns(workers, SIDES, update, _rounds(repeats), f"{turns} turns")
    return record


def random_batch(draw: random.Random) -> tuple[Rows, int, int, int, int]:
    """Rows, prompts, sessions of a prompt, ranks and token budget."""
    ranks = draw.choice([2, 4, 8, 16, 32, 64, 128, 256, 512])
    turns, budget = draw.choice([2, 4, 8, 16]), draw.choice([8192, 16384, 32768])
    sessions = draw.choice([4, 8, 16])
    prompts = max(8, ranks // draw.choice([1, 2, 4]))
    return grown_lengths(draw, prompts, sessions, turns, budget), prompts, sessions, ranks, budget


def grown_lengths(draw: random.Random, prompts: int, sessions: int, turns: int, budget: int) -> Rows:
    """Lengths of sessions that grow, for plans."""
    keys, tokens, extends = [], [], []
    for prompt in range(prompts):
        first = draw.randint(100, 800)
        for session in range(sessions):
            length, last = first, None
            for turn in range(number_of_turns(draw, turns)):
                length += draw.randint(50, 600)
                if length > budget:
                    break
                keys.append(row_key(f"p{prompt}", session, turn))
                tokens.append(length)
                extends.append(last)
                last = len(keys) - 1
                length += draw.randint(20, 300)
    return Rows.from_keys(keys, tokens, extends)


def job_of(prompts: int, sessions: int, ranks: int, budget: int, sharing: Sharing) -> Job:
    """A GRPO step of two mini-batches."""
    update = Update(dp_size=ranks, token_budget=budget, prompts_per_mini_batch=prompts // 2)
    return Job(
        strategy="prompt",
        prompts=prompts // 2 * 2,
        sessions_per_prompt=sessions,
        updates={"actor": update},
        inference={},
        packer="plan",
        sharing=sharing,
    )


def measure_plans(batches: int) -> dict[str, list[float]]:
    """Figures of the plans, batch by batch."""
    draw = random.Random(0)
    record: dict[str, list[float]] = {}
    for _ in track(range(batches), "plans", console=console):
        rows, prompts, sessions, ranks, budget = random_batch(draw)
        chains = plan_batch(rows, job_of(prompts, sessions, ranks, budget, "chains"))
        plan = chains.figures["actor"]
        job = job_of(prompts, sessions, ranks, budget, "off")
        blind = plan_batch(rows, job)
        sharing = replace(job, sharing="chains")
        shared = costs_of(rows, sharing, sharing.updates["actor"])
        steps = mini_batch_costs(micro_batches_of(blind.layouts["actor"]), shared)
        figures = {
            "over_bound": plan.micro_over_lower_bound or 0.0,
            "sharing_factor": plan.sharing_factor,
            "pads": plan.pads,
            "blind_over_bound": sum(step.micro_slowest for step in steps) / sum(step.micro_bound for step in steps),
            "blind_sharing_factor": sum(rows.tokens_R) / sum(step.computed_tokens for step in steps),
            "blind_pads": blind.figures["actor"].pads,
        }
        for name, figure in figures.items():
            record.setdefault(name, []).append(figure)
    return record


def measure_lineage(repeats: int) -> dict[str, Any]:
    """Seconds to find out which rows extend each other, round by round."""
    record: dict[str, Any] = {"rows": SEARCHED_ROWS, "searched": []}
    with ray_and_queue(object_store_bytes=2_000_000_000):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        from tests.support.rows_in_queue import PARTITION
        from verl_padding.pads.lineage import find_extensions

        generator = torch.Generator().manual_seed(0)
        keys, tokens_R = [], []
        for session in track(range(SEARCHED_ROWS // SEARCHED_TURNS), "rows", console=console):
            tip = torch.randint(5, 200, (SEARCHED_TOKENS + 50 * SEARCHED_TURNS,), generator=generator)
            lengths = [SEARCHED_TOKENS + 50 * (turn + 1 - SEARCHED_TURNS // 2) for turn in range(SEARCHED_TURNS)]
            rows = [{"input_ids": tip[:tokens], "position_ids": torch.arange(tokens)} for tokens in lengths]
            of_session = [row_key(str(session), 0, turn) for turn in range(SEARCHED_TURNS)]
            tq.kv_batch_put(of_session, PARTITION, fields=list_of_dict_to_tensordict(rows), tags=[{}] * len(rows))
            keys += of_session
            tokens_R += lengths
        batch = KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id=PARTITION, fields=None, extra_info={})
        record["tokens"] = sum(tokens_R)
        for _ in range(repeats):
            started = time.perf_counter()
            extends_R = find_extensions(batch, tokens_R)
            record["searched"].append(time.perf_counter() - started)
            assert extends_R == [row - 1 if row % SEARCHED_TURNS else None for row in range(SEARCHED_ROWS)]
        tq.kv_clear(keys=keys, partition_id=PARTITION)
    return record


def _seconds(took: list[dict[str, Any]]) -> list[float]:
    """Of each round, what comes before the update, and the update."""
    return [it["before"] + it["update"] for it in took]


def main(
    repeats: Annotated[int, typer.Option(min=2, help="Least rounds of all sides.")] = 3,
    batches: Annotated[int, typer.Option(min=1, help="Random batches to plan.")] = 200,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures plans, lineage and updates."""
    busy = busy_cores()
    plans, lineage, sides = measure_plans(batches), measure_lineage(repeats), measure_updates(repeats)
    lines, ratios = [], {}
    for turns, of_turns in sides.items():
        stock, plain, chains = (_seconds(of_turns[side.name]) for side in SIDES)
        factor = of_turns[CHAINS.name][0]["sharing_factor"]
        ratios[turns] = {
            "sharing_factor": factor,
            "stock_over_chains": [a / b for a, b in zip(stock, chains, strict=True)],
            "plan_over_chains": [a / b for a, b in zip(plain, chains, strict=True)],
        }
        for side in SIDES:
            took = of_turns[side.name]
            seconds = _seconds(took)
            lines.append(
                [
                    f"{turns} turns, {took[0]['rows']} rows: {side.name}",
                    took[0]["steps"],
                    took[0]["pads"],
                    spread([it["before"] for it in took]),
                    spread([it["update"] for it in took], 2),
                    spread([a / b for a, b in zip(stock, seconds, strict=True)], 2),
                    spread([a / b for a, b in zip(plain, seconds, strict=True)], 2),
                    took[0].get("sharing_factor", 1.0),
                    median(it["memory_gib"] for it in took),
                ]
            )
    show(
        "seconds of an update and before it, median (least-most); ratios of both together, round by round",
        ["side", "steps", "pads", "before", "update", "stock / side", "plan / side", "sharing factor", "GiB"],
        lines,
    )
    show(
        f"{batches} random batches, median (least-most)",
        ["", "slowest rank / bound", "sharing factor", "pads"],
        [
            [
                name,
                *(spread(plans[f"{prefix}{figure}"]) for figure in ("over_bound", "sharing_factor")),
                spread(plans[f"{prefix}pads"], 0),
            ]
            for name, prefix in (("chains", ""), ("a plan without them, the same engine", "blind_"))
        ],
    )
    console.print(
        f"lineage of {lineage['rows']} rows with {lineage['tokens'] / 1e6:.0f} million tokens: "
        f"{spread(lineage['searched'], 2)} s"
    )
    figures = {"sides": sides, "ratios": ratios, "plans": plans, "lineage": lineage}
    report(figures, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
