"""The page: what its bars and lines are computed from."""

import re
from dataclasses import fields
from importlib.resources import files

from tests.record.test_step_file import made_step
from tests.record.test_timings import two_ranks
from verl_padding.cli.page import Bar, ShownStep, one_after_the_other
from verl_padding.record.step_file import RecordedRow


def test_a_timed_call_is_shown_by_the_clock_and_another_by_its_tokens():
    timed = ShownStep(update=made_step(timings=two_ranks()), run="", texts={}).charts
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
    untimed = ShownStep(update=made_step(), run="", texts={})
    assert untimed.charts["actor"].unit == "tokens of rows"
    assert [bar.busy for bar in untimed.charts["actor"].bars] == [12 + 20 + 20, 15]


def test_columns_that_the_page_names_are_those_of_a_recorded_row():
    script = (files("verl_padding.cli") / "report_page/page.js").read_text()
    headings = re.findall(r"(\w+): \"", re.search(r"HEADINGS = \{(.*?)\}", script, re.S)[1])
    assert "advantage" in headings
    compared = re.findall(r"column === \"(\w+)\"", script)
    assert {*headings, *compared} <= {each.name for each in fields(RecordedRow)}


def test_a_micro_batch_begins_when_all_ranks_are_ready_with_the_one_before():
    busy = {(0, 0, 0): 3, (1, 0, 0): 2, (0, 0, 1): 1, (1, 0, 1): 4, (0, 1, 0): 5, (1, 1, 0): 5}
    bars = [
        Bar(rank, mini, micro, 0, each, 0, [], 0, 0) for (rank, mini, micro), each in busy.items()
    ]
    assert [(bar.start, bar.length) for bar in one_after_the_other(bars)] == [(0, 3)] * 2 + [
        (3, 4)
    ] * 2 + [(7, 5)] * 2
