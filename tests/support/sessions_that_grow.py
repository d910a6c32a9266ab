"""Sessions whose every turn is a row that begins with the whole row before it, and an
observation."""

import random

import torch

from tests.support.rows_in_queue import put_rows


def grown_sessions(turns, *, prompts):
    """Prompt and response of each row, by its key.

    Args:
        turns: rows of each session; sessions go to the prompts in turn.
    """
    draw = random.Random(0)
    texts = [[draw.randrange(5, 200) for _ in range(draw.randint(3, 6))] for _ in range(prompts)]
    rows = {}
    for session, n_turns in enumerate(turns):
        context = list(texts[session % prompts])
        for turn in range(n_turns):
            response = [draw.randrange(5, 200) for _ in range(draw.randint(1, 4))]
            rows[f"p{session % prompts}_{session // prompts}_{turn}"] = (list(context), response)
            context += response + [draw.randrange(5, 200) for _ in range(draw.randint(1, 3))]
    return rows


def put_grown_sessions(rows, **extra_fields):
    """Puts them into TransferQueue as verl's agent loop does."""
    lengths = [(len(prompt), len(response)) for prompt, response in rows.values()]
    return put_rows(
        lengths,
        list(rows),
        prompts=[torch.tensor(prompt) for prompt, _ in rows.values()],
        responses=[torch.tensor(response) for _, response in rows.values()],
        input_ids=[torch.tensor(prompt + response) for prompt, response in rows.values()],
        **extra_fields,
    )
