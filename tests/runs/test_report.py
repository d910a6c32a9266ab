"""What is read from the files of a job, and the rule of stock verl beside it."""

import json

import pytest

from verl_padding.job.metric_names import ROW_REWARD
from verl_padding.runs.report import METRICS, ROLLOUTS, StepRows, read_metrics, read_rows
from verl_padding.stock.padding import StockRule


def test_metrics_are_read_as_far_as_they_are_written(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = [{"step": 0, "data": {"val-core/x": 1.0}}, {"step": 1, "data": {ROW_REWARD: 0.5}}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 2, "da'
    (tmp_path / METRICS).write_text(text)
    assert read_metrics(tmp_path) == [(1, {ROW_REWARD: 0.5})]


def test_rows_are_counted_by_line_whatever_the_replies_hold(tmp_path):
    folder = tmp_path / ROLLOUTS
    folder.mkdir()
    (folder / "notes.jsonl").write_text("mine")
    uids_of = {10: ["ab_0_0", "ab_0_1", "cd_1_0"], 2: ["cd_0_0", "pad12_0_0", "pad12_1_0"]}
    for step, uids in uids_of.items():
        rows = [{"output": "a\u2028b\x85c", "uid": uid, "score": 0.5 if uid[0] == "a" else 1.0} for uid in uids]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(text)
    assert read_rows(tmp_path) == [
        StepRows(step=2, reward=1.0, real=1, dumped_pads=2),
        StepRows(step=10, reward=0.75, real=3, dumped_pads=0),  # of two sessions, not of three rows
    ]


@pytest.mark.parametrize(("rows", "padded", "steps"), [(1, 48, 3), (48, 48, 3), (49, 96, 6)])
def test_stock_verl_pads_to_the_multiple_of_ranks_and_mini_batches(rows, padded, steps):
    rule = StockRule(dp_size=2, actor_rows=16, critic_rows=24)
    assert (rule.padded_rows(rows), rule.optimizer_steps(rows)) == (padded, steps)
