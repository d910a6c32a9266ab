"""The page: what its bars and lines are computed from."""

from tests.record.test_step_file import made_step
from tests.timing.test_timings import two_ranks
from verl_padding.cli.page import Bar, cut_text, one_after_the_other, planned_chart, recorded_step
from verl_padding.plan import Job, Rows, Update
from verl_padding.plan.planner import costs_of


def test_a_micro_batch_begins_when_all_ranks_are_ready_with_the_one_before():
    busy = {(0, 0, 0): 3, (1, 0, 0): 2, (0, 0, 1): 1, (1, 0, 1): 4, (0, 1, 0): 5, (1, 1, 0): 5}
    bars = [
        Bar(rank, mini, micro, 0, each, 0, [], 0, 0) for (rank, mini, micro), each in busy.items()
    ]
    assert [(bar.start, bar.length) for bar in one_after_the_other(bars)] == [(0, 3)] * 2 + [
        (3, 4)
    ] * 2 + [(7, 5)] * 2


def test_bars_of_a_plan_are_as_long_as_rows_and_pads_cost():
    update = Update(
        dp_size=2, token_budget=4000, prompts_per_mini_batch=1, cost_model=lambda tokens: tokens * 7
    )
    job = Job(
        strategy="prompt",
        prompts=1,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={},
        pad_tokens=2,
    )
    costs = costs_of(Rows.from_keys(["a_0_0", "a_0_1", "a_0_2"], [1000, 500, 1500]), job, update)
    chart = planned_chart([[[[0, 1], [3]], [[2], [4]]]], costs)
    shown = [
        (bar.rank, bar.start, bar.busy, bar.length, list(bar.rows), bar.pads, bar.tokens)
        for bar in chart.bars
    ]
    assert shown == [
        (0, 0, 1.5, 1.5, [0, 1], 0, 1500),
        (0, 1.5, 0.002, 0.002, [], 1, 2),
        (1, 0, 1.5, 1.5, [2], 0, 1500),
        (1, 1.5, 0.002, 0.002, [], 1, 2),
    ]


def test_a_timed_call_is_shown_by_the_clock_and_another_by_its_tokens():
    timed = recorded_step(made_step(timings=two_ranks()), run="", texts={}).charts
    timing = two_ranks()[0]
    bars = timed[timing.call].bars
    assert timed[timing.call].unit == "seconds"
    assert len(bars) == len([each for each in two_ranks() if each.call == timing.call])
    assert min(bar.start for bar in bars) == 0
    assert (bars[0].length, bars[0].busy, bars[0].rows) == (
        timing.seconds,
        timing.known_busy_s,
        timing.rows,
    )
    untimed = recorded_step(made_step(), run="", texts={})
    assert untimed.charts["actor"].unit == "tokens of rows"
    assert [bar.busy for bar in untimed.charts["actor"].bars] == [sum(untimed.columns["tokens"])]


def test_rows_that_part_from_the_row_before_them_are_counted():
    rows = Rows.from_keys(["a_0_0", "a_0_1", "a_0_2"], [4, 6, 6])
    step = made_step(keys=rows.key_R, rows=[])
    shown = recorded_step(step, run="", texts={})
    assert "parted rows" not in shown.summary(), "nobody has recorded it"
    # Row 2 of the record parts from row 0, but that is in another session.
    assert recorded_step(made_step(), run="", texts={}).summary()["parted rows"] == "0"


def test_a_text_is_cut_in_the_middle():
    assert cut_text("abcdefg", 3) == ["abc", 1, "efg"]
    assert cut_text("abcdef", 3) == "abcdef"
