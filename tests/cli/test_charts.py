"""Charts: when the bars of a layout begin and end."""

from verl_padding.cli.charts import Bar, one_after_the_other


def test_a_micro_batch_begins_when_all_ranks_are_ready_with_the_one_before():
    busy = {(0, 0, 0): 3, (1, 0, 0): 2, (0, 0, 1): 1, (1, 0, 1): 4, (0, 1, 0): 5, (1, 1, 0): 5}
    bars = [
        Bar(rank, mini, micro, 0, each, 0, [], 0, 0) for (rank, mini, micro), each in busy.items()
    ]
    assert [(bar.start, bar.length) for bar in one_after_the_other(bars)] == [(0, 3)] * 2 + [
        (3, 4)
    ] * 2 + [(7, 5)] * 2
