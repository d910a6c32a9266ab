"""Timings by hand: their figures."""

import pytest

from verl_padding.plan import COST_MODELS
from verl_padding.record.timings import MicroBatchTiming, prediction_error


def timing(
    rank: int,
    micro_batch: int,
    seconds: float,
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
        "rows": (rank,),
        "pads": 0,
        "computed_tokens": tokens,
    }
    return MicroBatchTiming(**made | values)


def two_ranks() -> list[MicroBatchTiming]:
    """Rank 1 waits for rank 0: both show the 3 and 2 seconds that it takes."""
    return [
        timing(0, 0, 3.0, (30,)),
        timing(0, 1, 2.0, (20,)),
        timing(1, 0, 3.0, (10,)),
        timing(1, 1, 2.0, (15, 5)),
    ]


def error_of(timings: list[MicroBatchTiming]) -> float:
    return prediction_error(timings, COST_MODELS["tokens"])


def test_seconds_of_the_slowest_are_held_against_the_costliest_rank():
    assert error_of(two_ranks()) == pytest.approx(0), "30 and 20 tokens in 3 and 2 seconds"
    slow_for_its_tokens = [timing(0, 0, 2.0, (30,)), timing(0, 1, 2.0, (10,))]
    assert error_of(slow_for_its_tokens) == pytest.approx(2 / 4), "3 and 1 seconds by the costs"


def test_tokens_computed_in_another_row_cost_nothing_there():
    timings = [
        timing(0, 0, 3.0, (20, 20), shared_tokens=(0, 10)),
        timing(0, 1, 1.0, (10,)),
    ]
    assert error_of(timings) == pytest.approx(0), "30 and 10 tokens in 3 and 1 seconds"
