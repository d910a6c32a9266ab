"""What trees save: real updates of two FSDP2 ranks on rows that begin alike and part.

    python -m benchmarks.tree_updates [--keep] [--json]

*Cases*: sessions of 2, 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is left out of later
prompts, as templates of thinking models do; eight rollouts of each prompt, one row a session; and rows that share
nothing. As many rows as have ``COMPUTED_TOKENS`` that are unlike.

*Sides*: stock verl twice, with transformers' attention, which computes all pairs of tokens of a micro-batch on a CPU,
and with the attention of ``+local=cpu``, row by row; and, with the latter, ``+padding=prompt padding.packer=plan`` with
``padding.sharing`` off, chains and trees. The model is wide enough that most of what a token takes is linear layers.
They take turns (:mod:`benchmarks.two_ranks`), and CPU seconds of both ranks in the update are compared; seconds on the
clock, those before the update (rows are compared, the plan is made) and the largest resident set of a rank stand beside
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.results import AsJson, Keep, busy_cores, report, show, spread
from benchmarks.sharing import BUDGET, HIDDEN, Grown, number_of_turns, put_batch, random_tokens
from benchmarks.two_ranks import take_turns, two_ranks
from benchmarks.updates import RANKS, Side, StepSize, update_of
from verl_padding.plan.row_keys import row_key

COMPUTED_TOKENS = RANKS * 6 * BUDGET
SESSIONS = 8
ALL_PAIRS = Side(name="stock verl, all pairs", strategy=None)
STOCK = replace(ALL_PAIRS, name="stock verl", attention="row by row")
OFF = replace(STOCK, name="off", strategy="prompt", packer="plan")
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


def measure(repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each round of each side took, by turns."""
    record = {}
    with two_ranks(HIDDEN, BUDGET) as workers:
        for case in CASES:
            rows, size = drawn_rows(case)

            def update(side: Side, rows: Grown = rows, size: StepSize = size) -> dict[str, Any]:
                return update_of(workers, put_batch(rows), side, size) | {"rows": len(rows)}

            record[case] = take_turns(workers, SIDES, update, range(repeats + 1), case)
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
