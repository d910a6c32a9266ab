"""Rows that begin alike and part: rollouts of a prompt, and turns whose thinking the template
leaves out later."""

import random
from collections.abc import Sequence


def branching_rows(
    seed: int = 0,
    *,
    prompts: int = 3,
    rollouts: int = 3,
    turns: Sequence[int] = (1, 3, 2),
    system: int = 3,
) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and response of each row, by its key; the thinking of earlier turns is left out in
    every other session.

    Args:
        turns: rows of each session, in turn.
        system: tokens that all prompts begin with.
    """
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(5, 200) for _ in range(draw.randint(least, most))]

    begin, rows = tokens(system, system), {}
    for prompt in range(prompts):
        first = begin + tokens(3, 6)
        for session in range(rollouts):
            context = list(first)
            for turn in range(turns[session % len(turns)]):
                thinking, answer = tokens(2, 5), tokens(1, 4)
                rows[f"p{prompt}_{session}_{turn}"] = (list(context), thinking + answer)
                context += ([] if session % 2 else thinking) + answer + tokens(1, 3)
    return rows
