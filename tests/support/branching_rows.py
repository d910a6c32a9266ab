"""Rows that begin alike and branch: rollouts of a prompt, and turns whose thinking the template
leaves out later."""

import random


def branching_rows(*, prompts=3, rollouts=3, turns=(1, 3, 2), system=3):
    """Prompt and response of each row, by its key; the thinking of earlier turns is left out in
    every other session.

    Args:
        turns: rows of each session, in turn.
        system: tokens that all prompts begin with.
    """
    draw = random.Random(0)

    def tokens(least, most):
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
