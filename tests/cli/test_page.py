"""The page: what its bars and lines are computed from."""

from tests.record.test_step_file import made_step
from tests.record.test_timings import two_ranks
from verl_padding.cli.page import recorded_step


def test_a_timed_call_is_shown_by_the_clock_and_another_by_its_tokens():
    timed = recorded_step(made_step(timings=two_ranks()), run="", texts={}).charts
    timing = two_ranks()[0]
    bars = timed[timing.call].bars
    assert timed[timing.call].unit == "seconds"
    assert len(bars) == len([each for each in two_ranks() if each.call == timing.call])
    assert min(bar.start for bar in bars) == 0
    assert (bars[0].length, bars[0].busy, bars[0].rows) == (
        timing.seconds,
        timing.seconds,
        timing.rows,
    )
    untimed = recorded_step(made_step(), run="", texts={})
    assert untimed.charts["actor"].unit == "tokens of rows"
    assert [bar.busy for bar in untimed.charts["actor"].bars] == [sum(untimed.columns["tokens"])]
