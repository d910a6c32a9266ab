"""Timings by hand, in their order."""

from verl_padding.record.timings import MicroBatchTiming, timings_by_call


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


def test_timings_of_a_call_are_in_the_order_in_which_they_began():
    first, second = timing(0, 0, 3.0, (30,)), timing(0, 1, 2.0, (20,), start_s=103.0)
    other = timing(0, 0, 1.0, (5,), call="ref", start_s=99.0)
    assert list(timings_by_call([second, first, other]).items()) == [
        ("ref", [other]),
        ("actor", [first, second]),
    ]
    assert timing(0, 0, 3.0, (20, 20), shared_tokens=(0, 10)).tokens == 30
