"""The points of a run of recipes/guess that was stopped and resumed, and their picture."""

import json

from benchmarks.guess import points_of
from tests.cli.test_plan import write_lines
from tests.support.run_folder import write_run


def write_resumed_run(folder):
    """Of steps 1 and 2, the second was lost to a stop, and repeated."""
    run = write_run(folder / "run", padded=True)
    first, second = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    metrics = [json.loads(line) for line in (first, second)]
    for seconds, step in zip((60.0, 90.0), metrics, strict=True):
        step["data"] |= {"timing_s/step": seconds, "padding/real_rows/total": 7}
    lost = {"step": 2, "data": metrics[1]["data"] | {"timing_s/step": 500.0}}
    (run / "metrics").mkdir()
    for name, steps in (("1000", [metrics[0], lost]), ("2000", metrics[1:])):
        write_lines(run / f"metrics/{name}.jsonl", steps)
    rows = {"p_0_0": 1.0, "p_0_1": 1.0, "p_1_0": 0.1, "q_0_0": 0.0, "padding_0_0_0": 1.0}
    lines = [{"uid": uid, "score": score} for uid, score in rows.items()]
    write_lines(run / "rollouts/2.jsonl", lines)


def test_points_are_of_each_step_once_and_of_sessions(tmp_path):
    write_resumed_run(tmp_path)
    points = points_of(tmp_path)
    assert points["seconds"] == [60.0, 90.0]
    assert points["won"] == [0.0, 0.3333]  # one of three sessions, of which one has two rows
    assert points["optimizer_steps"] == [1.0, 1.0]
