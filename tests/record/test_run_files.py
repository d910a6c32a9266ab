"""The files of a run, as verl leaves them."""

import json

from verl_padding.record.run_files import (
    METRICS,
    ROLLOUTS,
    ROW_REWARD,
    StepRows,
    dumps_in,
    read_metrics,
    read_step,
)


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
        rows = [
            {"output": "a\u2028b\x85c", "uid": uid, "score": 0.5 if uid[0] == "a" else 1.0}
            for uid in uids
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(text)
    assert [read_step(path) for path in dumps_in(tmp_path / ROLLOUTS)] == [
        StepRows(step=2, reward=1.0, real=1, dumped_pads=2),
        StepRows(step=10, reward=0.75, real=3, dumped_pads=0),  # of two sessions, not of three rows
    ]
