"""The pads and optimizer steps of a run of stock verl, which logs neither."""

from benchmarks.runs import add_stock_counts
from tests.support.run_folder import write_run
from verl_padding.cli.curves import ACTOR_STEPS, read_curves
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_TOTAL


def test_the_counts_of_a_run_of_stock_verl_are_by_its_dumps_and_rule(tmp_path):
    curves, _ = read_curves(stock := write_run(tmp_path, padded=False))
    add_stock_counts(curves, stock)
    assert curves[REAL_ROWS_TOTAL] == {1: 5, 2: 8}
    assert curves[PAD_ROWS_TOTAL] == {1: 1, 2: 4}
    assert curves[ACTOR_STEPS] == {1: 1, 2: 2}
