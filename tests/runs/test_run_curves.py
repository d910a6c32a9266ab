"""Runs, one by one and side by side, from the files they leave, and the rule of stock verl beside them."""

import json
import math

import pytest
from typer.testing import CliRunner

from tests.support.pixels import pixels_of
from tests.support.run_folder import write_run
from verl_padding.cli.app import app
from verl_padding.errors import PaddingDataError
from verl_padding.job.metric_names import ROW_REWARD
from verl_padding.runs.charts import OURS, STOCK
from verl_padding.runs.curves import CONFIG, RunCurves, _looks, draw, stock_rule_of, table_of
from verl_padding.runs.report import METRICS, ROLLOUTS, Goal, Learning, StepRows, dumps_in, read_metrics, read_step
from verl_padding.stock.padding import StockRule


def compare(*arguments: object):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_a_padded_run_is_read_from_its_metrics_and_a_stock_one_by_verls_rule(tmp_path):
    ours = RunCurves.read(write_run(tmp_path / "padded", padded=True))
    stock = RunCurves.read(write_run(tmp_path / "stock", padded=False))
    assert (ours.steps, ours.optimizer_steps, ours.pads) == ([1, 2], [1, 1], [1, 1])
    assert (stock.optimizer_steps, stock.pads, stock.real_rows) == ([1, 2], [1, 4], [5, 8])
    assert ours.reward == stock.reward == [0.25, 0.5]
    assert stock.grad_norm == pytest.approx([0.1, 0.2])


def test_a_padded_run_whose_metrics_tell_its_rows_needs_no_dumps(tmp_path):
    folder = write_run(tmp_path / "padded", padded=True)
    (folder / ROLLOUTS / "2.jsonl").unlink()
    entries = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    entries[1]["data"] |= {"padding/session/score/mean": 0.125, "padding/real_rows/total": 7.0}
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = RunCurves.read(folder)
    assert (run.steps, run.reward, run.real_rows) == ([1, 2], [0.25, 0.125], [5, 7])


def test_stock_verls_rule_stands_beside_a_padded_run_without_what_it_would_earn(tmp_path):
    folder = write_run(tmp_path / "padded", padded=True)
    ours = RunCurves.read(folder)
    rule = ours.by_stock_rule(stock_rule_of(folder))
    assert (rule.optimizer_steps, rule.pads) == ([1, 2], [1, 4])
    cells = [list(column.cells) for column in table_of([ours, rule]).columns]
    assert [column[1] for column in cells] == ["verl's rule", "2", "-", "1 to 2", "-", "38.5%"]
    draw([ours, rule], tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png")(OURS) > 200
    assert pixels_of(tmp_path / "a.png")(STOCK) > 100


def test_the_command_draws_a_picture_and_prints_the_figures(tmp_path):
    runs = [write_run(tmp_path / name, padded=name == "padded") for name in ("padded", "[bold]stock")]
    picture = tmp_path / "runs.png"
    result = compare(*runs, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.split("\n") if "│" in line]
    assert "".join(line[0] for line in lines) == "".join(map(str, runs)), "no letter of a name is cut off"
    assert [line[3] for line in lines if line[1]] == ["1", "1 to 2"]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "rollouts"])
def test_a_run_without_metrics_or_dumps_is_refused_with_the_settings_that_make_them(tmp_path, missing):
    folder = write_run(tmp_path / "run", padded=True)
    (folder / missing).rename(folder / "elsewhere")
    with pytest.raises(PaddingDataError, match=r"no step with both .* Start the run with trainer\.logger"):
        RunCurves.read(folder)


def test_a_file_that_is_missing_or_cannot_be_written_is_named_in_one_line(tmp_path):
    folder = write_run(tmp_path / "run", padded=False)
    nowhere = compare(folder, "--picture", tmp_path / "no" / "runs.png")
    (folder / CONFIG).unlink()
    for result, path in ((nowhere, tmp_path / "no" / "runs.png"), (compare(folder), folder / CONFIG)):
        assert result.exit_code == 1
        assert str(path) in result.stderr
        assert result.stderr.count("\n") == 1


def test_runs_of_stock_verl_have_one_colour_and_padded_ones_another_in_whatever_order(tmp_path):
    ours = RunCurves.read(write_run(tmp_path / "ours", padded=True))
    stock = RunCurves.read(write_run(tmp_path / "stock", padded=False))
    assert (ours.is_stock, stock.is_stock) == (False, True)
    looks = [(look["color"], look["linestyle"]) for look in _looks([stock, ours, stock, ours])]
    assert looks == [(STOCK, "-"), (OURS, "-"), (STOCK, "--"), (OURS, "--")]


def test_a_padded_run_stays_one_where_a_step_has_trained_the_critic_alone(tmp_path):
    folder = write_run(tmp_path / "run", padded=True)
    first, second = (folder / "metrics.jsonl").read_text().splitlines()
    data = json.loads(first)["data"]
    kept = {name: data[name] for name in ("critic/score/mean", "padding/pad_rows/total")}
    for rest in (second + "\n", ""):
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": kept}) + "\n" + rest)
        run = RunCurves.read(folder)
        assert (run.optimizer_steps[0], run.pads[0]) == (0, 1)
        assert math.isnan(run.grad_norm[0])
        assert compare(folder, "--picture", tmp_path / "a.png").exit_code == 0


def test_metrics_are_read_as_far_as_they_are_written(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = [{"step": 0, "data": {"val-core/x": 1.0}}, {"step": 1, "data": {ROW_REWARD: 0.5}}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 2, "da'
    (tmp_path / METRICS).write_text(text)
    assert read_metrics(tmp_path) == [(1, {ROW_REWARD: 0.5})]


def test_a_metric_that_is_not_known_is_there_and_no_number(tmp_path):
    data = {ROW_REWARD: None, "a": float("nan"), "b": float("inf"), "c": 2, "d": "a word"}
    (tmp_path / METRICS).write_text(json.dumps({"step": 1, "data": data}) + "\n")
    ((step, metrics),) = read_metrics(tmp_path)
    assert (step, [*metrics]) == (1, [ROW_REWARD, "a", "b", "c"])
    assert [math.isnan(value) for value in metrics.values()] == [True, True, True, False]


def test_a_run_whose_metrics_have_an_unknown_reward_is_drawn(tmp_path):
    folder = write_run(tmp_path / "padded", padded=True)
    entries = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    entries[1]["data"] |= {"padding/session/score/mean": None, "padding/real_rows/total": 7.0, "actor/grad_norm": None}
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = RunCurves.read(folder)
    assert (run.reward[0], math.isnan(run.reward[1]), math.isnan(run.grad_norm[1])) == (0.25, True, True)
    assert compare(folder, "--picture", tmp_path / "a.png").exit_code == 0


def test_a_dump_with_an_unknown_score_has_an_unknown_reward(tmp_path):
    rows = [{"uid": "a_0_0", "score": 1.0}, {"uid": "a_1_0", "score": None}]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_step(tmp_path / "1.jsonl")
    assert (read.real, math.isnan(read.reward)) == (2, True)


def test_rows_are_counted_by_line_whatever_the_replies_hold(tmp_path):
    folder = tmp_path / ROLLOUTS
    folder.mkdir()
    (folder / "notes.jsonl").write_text("mine")
    uids_of = {10: ["ab_0_0", "ab_0_1", "cd_1_0"], 2: ["cd_0_0", "pad12_0_0", "pad12_1_0"]}
    for step, uids in uids_of.items():
        rows = [{"output": "a\u2028b\x85c", "uid": uid, "score": 0.5 if uid[0] == "a" else 1.0} for uid in uids]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(text)
    assert [read_step(path) for path in dumps_in(tmp_path / ROLLOUTS)] == [
        StepRows(step=2, reward=1.0, real=1, dumped_pads=2),
        StepRows(step=10, reward=0.75, real=3, dumped_pads=0),  # of two sessions, not of three rows
    ]


@pytest.mark.parametrize(("rows", "padded", "steps"), [(1, 48, 3), (48, 48, 3), (49, 96, 6)])
def test_stock_verl_pads_to_the_multiple_of_ranks_and_mini_batches(rows, padded, steps):
    rule = StockRule(dp_size=2, actor_rows=16, critic_rows=24)
    assert (rule.padded_rows(rows), rule.optimizer_steps(rows)) == (padded, steps)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_padded_run_whose_metrics_are_not_known_is_drawn(steps, tmp_path):
    folder = write_run(tmp_path / "padded", padded=True)
    entries = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for entry in entries[:steps]:
        entry["data"] = dict.fromkeys(entry["data"])
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert compare(folder, "--picture", tmp_path / "a.png").exit_code == 0
    cells = [next(iter(column.cells)) for column in table_of([RunCurves.read(folder)]).columns]
    # The second step has 1 pad and 8 rows.
    assert cells[3:] == (["1", "0.2", "12.5%"] if steps == 1 else ["-", "-", "-"])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_reward_that_is_not_known_makes_an_unknown_verdict(place):
    rewards = [0.9, 0.9, 0.9]
    rewards[place] = math.nan
    learning = Learning(rewards, Goal(reward=0.5, floor=0.4, steps=3))
    assert learning.learned is None
    assert "unknown" in str(learning)
    assert "nan" not in str(learning)
