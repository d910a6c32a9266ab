"""Rows as agents make them, of random tokens, and the plan of a batch of them."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.engine_in_process import Row, micro_batch_of
from verl_padding.pads.lineage import Inputs, extensions
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Sharing, Update, plan_batch
from verl_padding.plan.forest import Forest
from verl_padding.plan.row_keys import uid_of_key

Texts = dict[str, tuple[list[int], list[int]]]
"""Key of a row, as verl makes it -> tokens of its prompt and of its response."""


def sessions(
    draw: random.Random, prompts: int, *, scale: float, vocabulary: int, turns: int, grows: bool = False
) -> Texts:
    """Two sessions of a prompt, each call of the model a row.

    Earlier reasoning is left out of later prompts, as chat templates of thinking models do, unless the context grows.
    """
    rows = {}
    for prompt in range(prompts):
        first = tokens(draw, 800 * scale, vocabulary)
        for session in range(2):
            context = first
            for turn in range(turns):
                thought, answer, reply = (tokens(draw, n * scale, vocabulary) for n in (300, 100, 250))
                rows[f"{'g' if grows else 't'}{prompt}_{session}_{turn}"] = context, thought + answer
                context = context + (thought if grows else []) + answer + reply
    return rows


def rollouts(draw: random.Random, prompts: int, number: int, *, scale: float, vocabulary: int) -> Texts:
    """Rollouts of prompts of 4,000 tokens, with responses of 500 to 1,500."""
    firsts = [tokens(draw, 4_000 * scale, vocabulary) for _ in range(prompts)]
    return {
        f"p{prompt}_{n}_0": (first, tokens(draw, draw.uniform(500, 1_500) * scale, vocabulary))
        for prompt, first in enumerate(firsts)
        for n in range(number)
    }


def tokens(draw: random.Random, number: float, vocabulary: int) -> list[int]:
    """The first tokens are special ones."""
    return [draw.randrange(5, vocabulary) for _ in range(max(1, round(number)))]


def rows_of_prompts(keys: Iterable[str], prompts: str) -> list[int]:
    """Numbers of the rows of some prompts, each a digit."""
    return [number for number, key in enumerate(keys) if uid_of_key(key)[1:] in prompts]


def plan(
    rows: dict[str, Row],
    budget: int,
    *,
    sharing: Sharing = "off",
    idle: Sequence[int] = (),
    ranks: int = 1,
    has_pass: bool = False,
) -> BatchPlan:
    """One mini-batch of all rows, by the plan's packer."""
    keys, inputs = list(rows), Inputs(micro_batch_of(list(rows.values())))
    lengths = [len(ids) for ids in inputs.ids_R]
    forest = Forest.in_order(lengths, *inputs.trees(list(map(uid_of_key, keys))))
    prompts = len({uid_of_key(key) for key in keys})
    shape: dict[str, Any] = {"dp_size": ranks, "token_budget": budget}
    update = Update(**shape, prompts_per_mini_batch=prompts, skips_idle=bool(idle))
    job = Job(
        strategy="prompt",
        prompts=prompts,
        sessions_per_prompt=2,
        updates={"actor": update},
        inference={"log_prob": Pass(**shape, as_update="actor")} if has_pass else {},
        packer="plan",
        sharing=sharing,
    )
    return plan_batch(Rows.from_keys(keys, lengths, extensions(inputs, keys), forest, list(idle)), job)
