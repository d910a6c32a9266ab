"""Timings by hand: their figures."""

import pytest

from verl_padding.plan import COST_MODELS
from verl_padding.record.timings import (
    MicroBatchTiming,
    imbalance_and_waiting,
    prediction_error,
)


def timing(
    rank: int,
    micro_batch: int,
    seconds: float,
    busy_s: float | None,
    tokens: tuple[int, ...],
    **values,
) -> MicroBatchTiming:
    made = {
        "call": "actor",
        "rank": rank,
        "mini_batch": 0,
        "micro_batch": micro_batch,
        "start_s": 100.0,
        "seconds": seconds,
        "busy_s": busy_s,
        "rows": (rank,),
        "pads": 0,
        "computed_tokens": tokens,
    }
    return MicroBatchTiming(**made | values)


def two_ranks(told_apart: bool = True) -> list[MicroBatchTiming]:
    """Rank 0 takes 3 and 2 seconds, rank 1 takes 1 and 2: micro-batch 0 lasts 3 seconds,
    micro-batch 1 lasts 2."""
    busy = [3.0, 2.0, 1.0, 2.0] if told_apart else [None] * 4
    return [
        timing(0, 0, 3.0, busy[0], (30,)),
        timing(0, 1, 2.0, busy[1], (20,)),
        timing(1, 0, 3.0, busy[2], (10,)),
        timing(1, 1, 2.0, busy[3], (15, 5)),
    ]


def error_of(timings: list[MicroBatchTiming]) -> float:
    return prediction_error(timings, COST_MODELS["tokens"])


def test_figures_of_laps_made_by_hand():
    assert imbalance_and_waiting(two_ranks()) == pytest.approx(
        ((3 + 2) / ((5 + 3) / 2), (0 + 2) / 2)
    )
    assert error_of(two_ranks()) == pytest.approx(0), "seconds are a tenth of the tokens"


def test_without_known_waiting_the_slowest_is_held_against_the_costliest():
    assert imbalance_and_waiting(two_ranks(told_apart=False)) is None
    assert error_of(two_ranks(told_apart=False)) == pytest.approx(0), (
        "30 and 20 tokens in 3 and 2 seconds"
    )


def test_tokens_computed_in_another_row_cost_nothing_there():
    timings = [
        timing(0, 0, 3.0, 3.0, (20, 20), shared_tokens=(0, 10)),
        timing(0, 1, 1.0, 1.0, (10,)),
    ]
    assert error_of(timings) == pytest.approx(0), "30 and 10 tokens in 3 and 1 seconds"
