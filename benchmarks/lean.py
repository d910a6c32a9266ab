"""What it saves to compute neither idle rows nor a pass that nobody reads: real updates of two FSDP2 ranks.

    python -m benchmarks.lean [--keep] [--json]

*Idle rows*: 128 prompts of eight rollouts, in one mini-batch and in four; 0, 30 and 60 % of the tokens are of prompts
without an advantage. The update that computes all rows, and the one that leaves idle rows out
(``padding.idle_rows=skip``). *The pass*: one optimizer step whose old log-probs are those of a pass before it, or the
update's own (``padding.old_log_probs=update``), and that without idle rows. *All together*: prompts of 200 to 300
tokens, as an agent's with its tools, and sessions of four turns on average, whose reasoning is left out of later
prompts; 60 % of the tokens idle, one optimizer step. Stock verl's pass and update with transformers' attention, which
computes all pairs of tokens of a micro-batch on a CPU, and row by row, as ``+local=cpu`` does; and, with the latter,
trees, trees without idle rows, and that without the pass. Stock verl gets its best case: a mini-batch of all rows, so
that it takes one step, too, and one pad at most.

The loss has no KL and no entropy term. The sides of a case take turns (:mod:`benchmarks.two_ranks`), and their gradient
norms must be equal. CPU seconds of both ranks are compared; seconds on the clock stand beside them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from transfer_queue import KVBatchMeta

from benchmarks.results import AsJson, Keep, busy_cores, report, show, spread
from benchmarks.sharing import BUDGET, Grown, put_batch, random_tokens
from benchmarks.train_step import HIDDEN
from benchmarks.tree_updates import rollout, thinking_session
from benchmarks.two_ranks import take_turns, two_ranks
from benchmarks.updates import RANKS, Side, StepSize, update_of
from verl_padding.plan.row_keys import uid_of_key

PROMPTS = 128
SHARES = (0.0, 0.3, 0.6)
"""Idle tokens, as a share of all."""
ALL = Side(name="all rows", strategy="prompt", packer="plan", attention="row by row", has_terms=False)
SKIP = replace(ALL, name="without idle rows", skips_idle=True)
PASS, OWN = (
    replace(ALL, name="with the pass", old_log_probs="pass"),
    replace(ALL, name="without the pass", old_log_probs="update"),
)
BOTH = replace(OWN, name="without pass and idle rows", skips_idle=True)
STOCK = replace(PASS, name="stock verl", strategy=None, packer="verl")
ALL_PAIRS = replace(STOCK, name="stock verl, all pairs", attention="all pairs")
TREES = replace(PASS, name="trees", sharing="trees")
TREES_SKIP = replace(TREES, name="trees, without idle rows", skips_idle=True)
LEAN = replace(TREES_SKIP, name="trees, without idle rows and pass", old_log_probs="update")


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: Grown
    size: StepSize
    idle: list[int]
    """Numbers of rows."""
    sides: Sequence[Side]

    @property
    def idle_share(self) -> float:
        """Tokens of idle rows, as a share of all."""
        return sum(_tokens(self.rows[row]) for row in self.idle) / sum(map(_tokens, self.rows))


def cases() -> dict[str, Case]:
    """By name."""
    draw = random.Random(0)
    rollouts = _prompts(draw, rollout, PROMPTS, 8, (20, 60))
    thinking = _prompts(draw, partial(thinking_session, 4), 5, 4, (200, 300))
    made: dict[str, Case] = {}
    for steps, counted in ((1, "one mini-batch"), (4, "four mini-batches")):
        size = StepSize(prompts=PROMPTS, sessions=8, mini_prompts=PROMPTS // steps, budget=BUDGET)
        for share in SHARES:
            idle, sides = idle_rows(rollouts, share), (ALL, SKIP)
            made[f"{counted}, {share:.0%} idle"] = Case(rows=rollouts, size=size, idle=idle, sides=sides)
    made["pass"] = replace(made["one mini-batch, 60% idle"], sides=(PASS, OWN, BOTH))
    one_step = StepSize(prompts=1, sessions=len(thinking) + len(thinking) % RANKS, mini_prompts=1, budget=BUDGET)
    idle, sides = idle_rows(thinking, 0.6), (ALL_PAIRS, STOCK, TREES, TREES_SKIP, LEAN)
    made["all together"] = Case(rows=thinking, size=one_step, idle=idle, sides=sides)
    return made


def _prompts(draw: random.Random, session: Callable[..., Any], prompts: int, sessions: int, tokens: Any) -> Grown:
    firsts = [random_tokens(draw, *tokens) for _ in range(prompts)]
    each = [session(draw, first, f"p{p}", number)[0] for p, first in enumerate(firsts) for number in range(sessions)]
    return [row for of_session in each for row in of_session]


def _tokens(row: tuple[str, list[int], list[int]]) -> int:
    return len(row[1]) + len(row[2])


def idle_rows(rows: Grown, share: float) -> list[int]:
    """All rows of some prompts, drawn so that their share of all tokens is as close as it comes in 1,000 draws."""
    prompt_R = [uid_of_key(row[0]) for row in rows]
    prompts, total = sorted(set(prompt_R)), sum(map(_tokens, rows))
    draw = random.Random(0)

    def off(chosen: list[str]) -> float:
        tokens = sum(_tokens(row) for row, prompt in zip(rows, prompt_R, strict=True) if prompt in chosen)
        return abs(tokens / total - share)

    drawn = [draw.sample(prompts, round(share * len(prompts))) for _ in range(1000)]
    chosen = min(drawn, key=off)
    return [row for row, prompt in enumerate(prompt_R) if prompt in chosen]


def put(case: Case) -> KVBatchMeta:
    """The rows of a case, with all that an update reads; idle ones have no advantage."""
    from tests.support.rows_in_queue import put_columns, read_columns

    batch = put_batch(case.rows)
    (advantages,) = read_columns(batch, "advantages")
    return put_columns(batch, advantages=[each * (row not in case.idle) for row, each in enumerate(advantages)])


def update(workers: Any, case: Case, side: Side) -> dict[str, Any]:
    """What an update of a side took, and the pass before it."""
    return update_of(workers, put(case), side, case.size, case.idle)


def measure(repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each round of each side took, by case."""
    record = {}
    with two_ranks(HIDDEN, BUDGET) as workers:
        for name, case in cases().items():
            record[name] = take_turns(workers, case.sides, partial(update, workers, case), range(repeats + 1), name)
            first, *others = [took[-1]["grad_norm"] for took in record[name].values()]
            for other in others:
                np.testing.assert_allclose(other, first, rtol=1e-3, err_msg=f"{name}: sides learn otherwise")
    return record


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all sides.")] = 3,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures the updates of all cases."""
    busy = busy_cores()
    record = measure(repeats)
    figures, lines = {}, []
    for name, case in cases().items():
        first, *_ = sides = record[name]
        share = {
            side: [its["cpu"] / all_its["cpu"] for its, all_its in zip(took, sides[first], strict=True)]
            for side, took in sides.items()
        }
        figures[name] = {"rows": len(case.rows), "idle": case.idle_share, "sides": sides, "share": share}
        for side, took in sides.items():
            columns = [took[0]["steps"], took[0]["pads"], spread([it["before"] for it in took], 2)]
            columns += [spread([it[clock] for it in took], 2) for clock in ("update", "cpu")]
            lines.append([f"{name}: {side}", *columns, spread(share[side])])
    columns = ["side", "steps", "pads", "before", "update and pass", "CPU", "CPU / CPU of the first side"]
    show("seconds, median (least-most)", columns, lines)
    report({"cases": figures}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
