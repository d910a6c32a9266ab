"""What plans gain that learn from the clock: updates of real FSDP2 workers, turn by turn.

    python -m benchmarks.measured_costs [--keep] [--json]

Three mixes of rows on two ranks of a CPU, where torch's attention computes all pairs of tokens of a micro-batch and
verl's formula is wrong: the long-tailed rows of ``long_tailed.jsonl``, short ones, and short ones with a few long. The
token budget is 8,192, half of verl's default: a limit of memory, as it is meant, and far above the fill that is fastest
here. Sides: stock verl with its trainer's own balancing and pads, at the number of optimizer steps that the same
settings give it there, more than the plan's; ``padding=prompt`` with verl's packer, with the plan's, and with the
plan's and measured costs. The last one learns in updates before those that are reported. The sides take turns, each
from the model's weights, on the same rows, put anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Annotated, Any

import typer
from transfer_queue import KVBatchMeta

from benchmarks.results import AsJson, Keep, busy_cores, console, report, show, spread
from benchmarks.train_step import HIDDEN, put_batch, put_lengths
from benchmarks.two_ranks import start_side, take_turns, two_ranks
from benchmarks.updates import Side, StepSize, planned_update, update_of
from verl_padding.plan import COST_MODELS
from verl_padding.plan.row_keys import row_key
from verl_padding.timing.learned_costs import LearnedCosts
from verl_padding.worker import micro_batch_clock

STOCK = Side(name="stock verl", strategy=None)
VERLS = Side(name="verl's packer", strategy="prompt")
PLANS = Side(name="plan's packer", strategy="prompt", packer="plan")
MEASURED = Side(name="plan's packer, measured costs", strategy="prompt", packer="plan")
SIDES = (STOCK, VERLS, PLANS, MEASURED)
SIZE = StepSize(prompts=16, sessions=8, mini_prompts=8, budget=8192)
LONGEST = 2048
"""Tokens of a row."""
LEARNING = 6
"""Updates of the last side before those that are reported."""


def long_tailed() -> KVBatchMeta:
    """Puts the first prompts of the file."""
    return put_batch(SIZE.prompts)


def drawn(longest: int, long_rows: int) -> Callable[[], KVBatchMeta]:
    """Puts two rows a session of 10 to ``longest`` tokens, but a few as long as a row may be."""

    def put() -> KVBatchMeta:
        draw = random.Random(longest)
        keys = [
            row_key(f"p{prompt}", session, row)
            for prompt in range(SIZE.prompts)
            for session in range(SIZE.sessions)
            for row in range(2)
        ]
        lengths = [(draw.randint(5, longest // 2), draw.randint(5, longest // 2)) for _ in keys]
        for number in range(long_rows):
            lengths[number * len(keys) // long_rows] = (LONGEST // 2, LONGEST // 2)
        return put_lengths(lengths, keys)

    return put


MIXES: dict[str, Callable[[], KVBatchMeta]] = {
    "long-tailed": long_tailed,
    "short": drawn(320, 0),
    "short, six long": drawn(320, 6),
}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all sides.")] = 3,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures all sides of each mix, after the updates that the last side learns from."""
    busy = busy_cores()
    record: dict[str, dict[str, list[dict[str, Any]]]] = {}
    costs: dict[str, Any] = {}
    with two_ranks(HIDDEN, LONGEST, SIZE.budget) as workers:
        import verl_padding.local.cpu_platform  # noqa: F401  (the clock asks for it, here as in workers)

        workers.execute_with_func_generator(micro_batch_clock.install_in_worker)
        for mix, put in MIXES.items():
            learned = LearnedCosts()
            for step in range(LEARNING):
                start_side(workers, MEASURED)
                _learning_update(workers, put(), learned, step)
            steps = count(LEARNING)

            def update(side: Side, put: Any = put, learned: Any = learned, steps: Any = steps) -> dict[str, Any]:
                if side is MEASURED:
                    return _learning_update(workers, put(), learned, next(steps))
                return update_of(workers, put(), side, SIZE)

            record[mix] = take_turns(workers, SIDES, update, range(repeats), mix, warm_up=False)
            costs[mix] = {name: getattr(cost, name) for name in COEFFICIENTS} if (cost := _cost(learned)) else None
    for mix, sides in record.items():
        _show(mix, sides, costs[mix])
    report({"mixes": record, "costs": costs}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


COEFFICIENTS = ("handling_s", "per_token_s", "per_square_s", "per_pair_s")


def _learning_update(workers: Any, batch: KVBatchMeta, learned: LearnedCosts, step: int) -> dict[str, Any]:
    took = planned_update(workers, batch, MEASURED, SIZE, _cost(learned), timed=True)
    answer = workers.execute_with_func_generator(micro_batch_clock.read_in_worker)
    laps = list(answer.non_tensor_batch[micro_batch_clock.LAPS])
    for said in learned.learn(laps, {"actor": COST_MODELS["attention"]}, ["actor"]):
        console.print(said)
    return took


def _cost(learned: LearnedCosts) -> Any:
    return learned.cost_of("actor", cut_by_plan=True)


def _show(mix: str, sides: dict[str, list[dict[str, Any]]], cost: dict[str, float] | None) -> None:
    of = {name: [took["update"] for took in rounds] for name, rounds in sides.items()}

    def ratios(name: str, side: str) -> str:
        return spread([theirs / its for theirs, its in zip(of[name], of[side], strict=True)])

    show(
        f"{mix}: seconds of an update, median (least-most); ratios round by round",
        ["side", "steps", "micro-batches", "pads", "update", "stock / side", "verl's packer / side"],
        [
            [
                name,
                rounds[0]["steps"],
                rounds[-1].get("micro_batches") or "",
                rounds[0]["pads"],
                spread(of[name], 2),
                ratios(STOCK.name, name),
                ratios(VERLS.name, name),
            ]
            for name, rounds in sides.items()
        ],
    )
    console.print(f"learned: {cost}")


if __name__ == "__main__":
    typer.run(main)
