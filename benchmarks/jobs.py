"""Batches to plan: the five that figures are always given for, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHORTEST = 16


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Rows of one training step, and how they are to be trained."""

    name: str
    tokens_R: list[int]
    """Tokens of each row, prompt and response."""
    dp_size: int
    mini_batch_rows: int
    """Rows of a mini-batch by verl's count: ppo_mini_batch_size x rollout.n; a multiple of
    ``dp_size``."""
    token_budget: int
    """Tokens of a micro-batch on one rank."""

    @property
    def verl_steps(self):
        """Optimizer steps that verl takes: as many as its padded rows fill."""
        return -(-len(self.tokens_R) // self.mini_batch_rows)


def five_jobs():
    """Lognormal row lengths, drawn one job after the other from one generator."""
    rng = np.random.default_rng(0)
    shapes = [
        # rows, ranks, mini-batch, median, sigma, longest, budget
        (1100, 8, 256, 1500, 0.9, 16384, 16384),
        (1100, 8, 256, 1500, 0.9, 16384, 32768),
        (3509, 8, 640, 800, 0.8, 8192, 16384),
        (700, 16, 128, 4000, 1.0, 32768, 32768),
        (361, 2, 120, 300, 0.8, 2048, 4096),
    ]
    return [
        BatchJob(
            name=f"{rows} rows, {ranks} ranks, budget {budget}",
            tokens_R=_clipped(rng.lognormal(np.log(middle), sigma, rows), longest),
            dp_size=ranks,
            mini_batch_rows=mini,
            token_budget=budget,
        )
        for rows, ranks, mini, middle, sigma, longest, budget in shapes
    ]


def random_jobs(number, seed=1):
    """Jobs of 2 to 512 ranks, 1 to 40 rows a prompt, rows of up to 128k tokens, budgets of 1 to 8
    longest rows."""
    rng = np.random.default_rng(seed)
    mixes = (_lognormal, _turns, _two_kinds, _even)
    for index in range(number):
        mix = mixes[index % len(mixes)]
        ranks = int(2 ** rng.integers(1, 10))
        steps = int(rng.integers(1, 5))
        # Rows that a prompt should have, and has: verl counts in the former.
        sessions, most_rows = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        rows_of_rank = int(
            np.exp(rng.uniform(np.log(4), np.log(min(80, max(5, MAX_ROWS // (ranks * steps))))))
        )
        mini_prompts = -(-ranks * rows_of_rank // sessions)
        mini_rows = -(-mini_prompts * sessions // ranks) * ranks
        tokens: list[int] = []
        for _ in range(mini_prompts * steps):
            for _ in range(sessions):
                tokens += mix(rng, int(rng.integers(1, most_rows + 1)))
        budget = int(max(tokens) * rng.choice([1, 1.5, 2, 4, 8]))
        yield BatchJob(
            name=f"{index}: {mix.__name__.strip('_')}",
            tokens_R=tokens,
            dp_size=ranks,
            mini_batch_rows=mini_rows,
            token_budget=budget,
        )


LONGEST = 131072

MAX_ROWS = 4096
"""Rows of a batch by verl's count, about: what verl's functions lay out in seconds."""


def _lognormal(rng, rows):
    return _clipped(rng.lognormal(np.log(2000), 1.0, rows), LONGEST)


def _turns(rng, rows):
    """One row a turn: each holds the turns before it."""
    return _clipped(np.cumsum(rng.lognormal(np.log(1500), 0.8, rows)), LONGEST)


def _two_kinds(rng, rows):
    """Short answers, and one in twenty that reasons for tens of thousands of tokens."""
    long = rng.random(rows) < 0.05
    return _clipped(
        np.where(long, rng.uniform(16384, LONGEST, rows), rng.lognormal(np.log(800), 0.5, rows)),
        LONGEST,
    )


def _even(rng, rows):
    return _clipped(rng.uniform(200, 8000, rows), LONGEST)


def _clipped(lengths, longest):
    return [int(length) for length in np.clip(lengths, SHORTEST, longest)]
