"""Real updates of two FSDP2 ranks: stock verl beside the plan, shared prefixes, and rows that are
left out.

    python -m benchmarks.updates packing|trees|idle|hybrid|fast [--keep]

*packing*: the rows of ``long_tailed.jsonl``, 24 prompts of 8 sessions of 1 to 5 rows: stock verl;
at its number of optimizer steps ``padding=lcm``, with both packers; at the configured number
``padding=prompt``.

*trees*: sessions of 2, 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is
left out of later prompts; eight rollouts of each prompt; and rows that share nothing. Each case has
some 12,000 tokens that are unlike. The model is wide enough that most of what a token takes is
linear layers.

*idle*: 128 prompts of eight rollouts, of which 0, 30 and 60 % of the tokens have no advantage, with
and without them (``padding.zero_advantage_rows=skip``), and without the pass before the update
(``padding.recompute_old_log_probs=false``). The gradient norms of a case's sides must be equal.

*hybrid*: the sessions of 4 and 8 calls of *trees*, of texts four times as long, by a model with
linear attention, whose packed rows are apart on both sides.

*fast*: what ``+padding=fast`` turns on, beside stock verl with its pass and one optimizer step:
rollouts of one prompt, sessions that think, sessions that grow, and rollouts of which 60 % are
idle; with the most memory that a rank has taken.

Sides take turns in one job, in one order and the other, each from the model's weights, on the same
rows, put anew; a first round is not kept. Stock verl's first side has transformers' attention,
which computes all pairs of tokens of a micro-batch on a CPU; all others of *trees*, *idle* and
*fast* attend row by row, as ``+local=cpu`` does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.results import Keep, busy_cores, report
from benchmarks.two_ranks import cpu_seconds, peak_mib, start_side, two_ranks
from benchmarks.update_sides import RANKS, Case, Row, Side
from verl_padding.plan.row_keys import row_key, uid_of_key

LONG_TAILED = Path(__file__).parent / "long_tailed.jsonl"
BUDGET = 1024
HYBRID_SCALE = 4

ALL_PAIRS = Side(name="stock verl, all pairs", all_pairs=True)
STOCK = Side(name="stock verl")
OFF = Side(name="off", strategy="prompt", packer="plan")
TREES = replace(OFF, name="trees", sharing="on")

ROWS = replace(OFF, name="all rows", has_terms=False)
SKIP = replace(ROWS, name="without idle rows", skips_idle=True)
WITH_PASS = replace(ROWS, name="with the pass", old_log_probs="pass")
NO_PASS = replace(ROWS, name="without the pass", old_log_probs="update")
LEAN = replace(NO_PASS, name="without pass and idle rows", skips_idle=True)
STOCK_PASS = replace(STOCK, old_log_probs="pass", has_terms=False)
FAST = replace(LEAN, name="fast", sharing="on")


def long_tailed() -> dict[str, Case]:
    """The rows of the file, with random tokens."""
    draw = random.Random(0)
    rows: list[Row] = []
    for number, line in enumerate(map(json.loads, LONG_TAILED.read_text().splitlines())):
        lengths = line["prompt_tokens"], line["response_tokens"]
        prompt, response = (random_tokens(draw, tokens, tokens) for tokens in lengths)
        rows.append((row_key(line["prompt"], line["session"], number), prompt, response))
    sides = (
        replace(ALL_PAIRS, name="stock verl"),
        Side(name="lcm, verl's packer", strategy="lcm", all_pairs=True),
        Side(name="lcm, plan's", strategy="lcm", packer="plan", all_pairs=True),
        Side(name="prompt, plan's", strategy="prompt", packer="plan", all_pairs=True),
    )
    return {"long-tailed": Case(rows=rows, prompts=24, sessions=8, mini_prompts=8, sides=sides)}


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


def draw_rows(
    seed: str | int, session: Session, prompts: int, sessions: int, tokens: tuple[int, int]
) -> list[Row]:
    """The rows of so many sessions of each prompt, which has least and most ``tokens``."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for prompt in range(prompts):
        first = random_tokens(draw, *tokens)
        for number in range(sessions):
            rows += session(draw, first, f"p{prompt}", number)
    return rows


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
        name: Case(
            rows=draw_rows(name, session, prompts, 8, tokens),
            prompts=prompts,
            sessions=8,
            mini_prompts=prompts,
            sides=(ALL_PAIRS, STOCK, OFF, TREES),
        )
        for name, (session, prompts, tokens) in drawn.items()
    }


def hybrid_cases() -> dict[str, Case]:
    """Sessions that think at length, for a model with linear attention."""
    return {
        f"{turns} turns that think": Case(
            rows=draw_rows(
                turns,
                partial(thinking_session, turns, scale=HYBRID_SCALE),
                RANKS,
                sessions,
                (100, 200),
            ),
            prompts=RANKS,
            sessions=sessions,
            mini_prompts=RANKS,
            sides=(OFF, TREES),
        )
        for turns, sessions in ((4, 4), (8, 2))
    }


def idle_cases() -> dict[str, Case]:
    """Rollouts of which some are idle."""
    rows = draw_rows(0, rollout, 128, 8, (20, 60))
    one_step = Case(rows=rows, prompts=128, sessions=8, mini_prompts=128, sides=(ROWS, SKIP))
    cases = {
        f"{share:.0%} idle": replace(one_step, idle=idle_rows(rows, share))
        for share in (0.0, 0.3, 0.6)
    }
    return cases | {"pass": replace(cases["60% idle"], sides=(WITH_PASS, NO_PASS, LEAN))}


def fast_cases() -> dict[str, Case]:
    """Rows of four kinds, each kind in one mini-batch, for stock verl, too."""
    kinds: dict[str, tuple[Session, int, int, tuple[int, int], float]] = {
        "rollouts of one prompt": (rollout, 4, 8, (300, 500), 0.0),
        "sessions that think": (partial(thinking_session, 4), 5, 4, (200, 300), 0.0),
        "sessions that grow": (partial(thinking_session, 4, forgets=False), 5, 4, (200, 300), 0.0),
        "60% idle": (rollout, 16, 8, (20, 60), 0.6),
    }
    cases = {}
    for name, (session, prompts, sessions, tokens, idle) in kinds.items():
        rows = draw_rows(name, session, prompts, sessions, tokens)
        cases[name] = Case(
            rows=rows,
            prompts=1,
            sessions=len(rows) + len(rows) % RANKS,
            mini_prompts=1,
            idle=idle_rows(rows, idle),
            sides=(STOCK_PASS, FAST),
        )
    return cases


def idle_rows(rows: Sequence[Row], share: float) -> list[int]:
    """All rows of the first prompts, as large a share as asked for."""
    prompt_R = [uid_of_key(row[0]) for row in rows]
    prompts = list(dict.fromkeys(prompt_R))
    idle = prompts[: round(share * len(prompts))]
    return [row for row, prompt in enumerate(prompt_R) if prompt in idle]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are measured with one model."""

    cases: Callable[[], dict[str, Case]]
    hidden: int
    budget: int = BUDGET
    kind: str = "qwen2"
    same_gradient: bool = False
    """Whether all sides of a case compute the same optimizer steps."""


GROUPS = {
    "packing": Group(cases=long_tailed, hidden=256, budget=2048),
    "trees": Group(cases=sharing_cases, hidden=512),
    "idle": Group(cases=idle_cases, hidden=256, same_gradient=True),
    "fast": Group(cases=fast_cases, hidden=512, same_gradient=True),
    "hybrid": Group(
        cases=hybrid_cases,
        hidden=512,
        budget=BUDGET * HYBRID_SCALE,
        kind="qwen3_5_text",
        same_gradient=True,
    ),
}


def measure(group: Group, repeats: int) -> dict[str, Any]:
    """What each round of each side took, by case."""
    figures = {}
    with two_ranks(group.hidden, group.budget, group.kind) as workers:
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
            if group.same_gradient:
                first, *others = [took[-1]["grad_norm"] for took in sides.values()]
                for other in others:
                    np.testing.assert_allclose(
                        other, first, rtol=1e-3, err_msg=f"{name}: sides learn otherwise"
                    )
            figures[name] = {"rows": len(case.rows), "idle": case.idle_share, "sides": sides}
    return figures


def main(group: str, repeats: int = 3, keep: Keep = False) -> None:
    """Measures the updates of all cases of a group."""
    busy = busy_cores()
    report(f"updates {group}", {"cases": measure(GROUPS[group], repeats)}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
