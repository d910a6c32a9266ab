"""Real updates of two ranks: shared prefixes, rows that are left out, and stock verl beside both.

    python -m benchmarks.updates trees|idle|hybrid|fast [--keep]
    VERL_USE_EXTERNAL_MODULES=tests.support.engines python -m benchmarks.updates megatron|veomni

*trees*: sessions of 2, 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is
left out of later prompts; eight rollouts of each prompt; and rows that share nothing. Each case has
some 12,000 tokens that are unlike. The model is wide enough that most of what a token takes is
linear layers. *megatron* and *veomni* are the same on these engines without their kernels, on two
ranks of tensor and of data parallelism; the others are of FSDP2.

*idle*: 128 prompts of eight rollouts, of which 0, 30 and 60 % of the tokens have no advantage, with
and without them (``padding.zero_advantage_rows=skip``), and without the pass before the update
(``padding.recompute_old_log_probs=false``). The gradient norms of a case's sides must be equal.

*hybrid*: the sessions of 4 and 8 calls of *trees*, of texts four times as long, by a model with
linear attention, whose packed rows are apart on both sides.

*fast*: what ``+padding=fast`` turns on, beside stock verl with its pass and one optimizer step:
rollouts of one prompt, sessions that think, sessions that grow, and rollouts of which 60 % are
idle; with the most memory that a rank has taken.

Sides take turns in one job, in one order and the other, each from the model's weights, on the same
rows, put anew, and attend row by row, as ``+local=cpu`` does; a first round is not kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.results import Keep, busy_cores, report
from benchmarks.two_ranks import cpu_seconds, peak_mib, start_side, two_ranks
from benchmarks.update_sides import RANKS, Case, Row, Side
from verl_padding.plan.row_keys import row_key

BUDGET = 1024
HYBRID_SCALE = 4

OFF = Side(name="off")
TREES = replace(OFF, name="trees", sharing="on")

ROWS = replace(OFF, name="all rows")
SKIP = replace(ROWS, name="without idle rows", drops_zero_advantage=True)
WITH_PASS = replace(ROWS, name="with the pass", old_log_probs="pass")
NO_PASS = replace(ROWS, name="without the pass", old_log_probs="update")
LEAN = replace(NO_PASS, name="without pass and idle rows", drops_zero_advantage=True)
STOCK = Side(name="stock verl", is_stock=True, old_log_probs="pass")
FAST = replace(LEAN, name="fast", sharing="on")


def random_tokens(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(5, 200) for _ in range(draw.randint(least, most))]


Session = Callable[[random.Random, list[int], str, int], list[Row]]
"""Draws the rows of a session of a prompt."""


def thinking_session(
    turns: int,
    draw: random.Random,
    first: list[int],
    prompt: str,
    session: int,
    scale: int = 1,
    *,
    forgets: bool = True,
) -> list[Row]:
    """A row a call, whose reasoning is left out of later prompts if the agent ``forgets``; if not,
    each row begins with the whole row before it."""
    rows: list[Row] = []
    context = list(first)
    for turn in range(max(1, round(turns * draw.lognormvariate(-0.125, 0.5)))):
        thought, answer = (random_tokens(draw, 10 * scale, most * scale) for most in (60, 45))
        if len(context) + len(thought) + len(answer) > BUDGET * scale:
            break
        rows.append((row_key(prompt, session, turn), list(context), thought + answer))
        told = answer + random_tokens(draw, 10 * scale, 30 * scale)
        context += told if forgets else thought + told
    return rows


def rollout(draw: random.Random, first: list[int], prompt: str, session: int) -> list[Row]:
    """The one row of a session."""
    return [(row_key(prompt, session, 0), list(first), random_tokens(draw, 60, 140))]


def alone(draw: random.Random, first: list[int], prompt: str, session: int) -> list[Row]:
    """A row whose prompt is its own."""
    return rollout(draw, random_tokens(draw, 100, 300), prompt, session)


def case_of(
    sides: tuple[Side, ...],
    seed: str | int,
    session: Session,
    prompts: int,
    sessions: int,
    tokens: tuple[int, int],
    idle: float = 0.0,
) -> Case:
    """Draws the rows of so many sessions of each prompt, which has least and most ``tokens``; the
    rows of the first prompts are idle, as large a share as asked for."""
    draw = random.Random(seed)
    rows: list[Row] = []
    idle_rows: list[int] = []
    for prompt in range(prompts):
        first, begin = random_tokens(draw, *tokens), len(rows)
        for number in range(sessions):
            rows += session(draw, first, f"p{prompt}", number)
        if prompt < round(idle * prompts):
            idle_rows += range(begin, len(rows))
    return Case(rows=rows, sides=sides, idle=idle_rows)


def sharing_cases() -> dict[str, Case]:
    """Sessions that think, rollouts, and rows that share nothing."""
    drawn: dict[str, tuple[Session, int, tuple[int, int]]] = {
        "2 turns that think": (partial(thinking_session, 2), 7, (20, 60)),
        "4 turns that think": (partial(thinking_session, 4), 3, (20, 60)),
        "8 turns that think": (partial(thinking_session, 8), 2, (20, 60)),
        "8 rollouts of a prompt": (rollout, 11, (300, 500)),
        "nothing to share": (alone, 6, (1, 1)),
    }
    return {
        name: case_of((OFF, TREES), name, session, prompts, 8, tokens)
        for name, (session, prompts, tokens) in drawn.items()
    }


def hybrid_cases() -> dict[str, Case]:
    """Sessions that think at length, for a model with linear attention."""
    cases = {}
    for turns, sessions in ((4, 4), (8, 2)):
        session = partial(thinking_session, turns, scale=HYBRID_SCALE)
        cases[f"{turns} turns that think"] = case_of(
            (OFF, TREES), turns, session, RANKS, sessions, (100, 200)
        )
    return cases


def idle_cases() -> dict[str, Case]:
    """Rollouts of which some are idle."""
    rollouts = (0, rollout, 128, 8, (20, 60))
    cases = {f"{idle:.0%} idle": case_of((ROWS, SKIP), *rollouts, idle) for idle in (0.0, 0.3, 0.6)}
    return cases | {"pass": case_of((WITH_PASS, NO_PASS, LEAN), *rollouts, 0.6)}


def fast_cases() -> dict[str, Case]:
    """Rows of four kinds."""
    kinds: dict[str, tuple[Session, int, int, tuple[int, int], float]] = {
        "rollouts of one prompt": (rollout, 4, 8, (300, 500), 0.0),
        "sessions that think": (partial(thinking_session, 4), 5, 4, (200, 300), 0.0),
        "sessions that grow": (partial(thinking_session, 4, forgets=False), 5, 4, (200, 300), 0.0),
        "60% idle": (rollout, 16, 8, (20, 60), 0.6),
    }
    return {name: case_of((STOCK, FAST), name, *kind) for name, kind in kinds.items()}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are measured with one model."""

    cases: Callable[[], dict[str, Case]]
    hidden: int
    budget: int = BUDGET
    kind: str = "qwen2"
    settings: tuple[str, ...] = ()
    """Those of an engine other than FSDP2's."""


ACTOR = "actor_rollout_ref.actor"
TENSOR = ("+local=cpu_megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2")
VEOMNI = ("+local=cpu_veomni", f"{ACTOR}.optim.lr_scheduler_type=constant")
GROUPS = {
    "trees": Group(cases=sharing_cases, hidden=512),
    "megatron": Group(cases=sharing_cases, hidden=512, settings=TENSOR),
    "veomni": Group(cases=sharing_cases, hidden=512, settings=VEOMNI),
    "idle": Group(cases=idle_cases, hidden=256),
    "fast": Group(cases=fast_cases, hidden=512),
    "hybrid": Group(
        cases=hybrid_cases,
        hidden=512,
        budget=BUDGET * HYBRID_SCALE,
        kind="qwen3_5_text",
    ),
}


def measure(group: Group, repeats: int) -> dict[str, Any]:
    """What each round of each side took, by case."""
    figures = {}
    with two_ranks(group.hidden, group.budget, group.kind, group.settings) as workers:
        for name, case in group.cases().items():
            sides: dict[str, list[dict[str, Any]]] = {side.name: [] for side in case.sides}
            for number in track(range(repeats + 1), name):
                for side in case.sides if number % 2 else reversed(case.sides):
                    start_side(workers, side)
                    before = cpu_seconds(workers)
                    took = case.update(workers, side, group.budget)
                    if number:
                        took["cpu"] = cpu_seconds(workers) - before
                        sides[side.name].append(took | {"peak_mib": peak_mib(workers)})
            norms = [took[-1]["grad_norm"] for took in sides.values()]
            np.testing.assert_allclose(
                norms, norms[0], rtol=1e-3, err_msg=f"{name}: sides learn otherwise"
            )
            figures[name] = {"rows": len(case.rows), "idle": case.idle_share, "sides": sides}
    return figures


def main(group: str, repeats: int = 3, keep: Keep = False) -> None:
    """Measures the updates of all cases of a group."""
    busy = busy_cores()
    report(f"updates {group}", {"cases": measure(GROUPS[group], repeats)}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
