"""Runs side by side, from the files they leave."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.run_folder import write_run
from verl_padding.cli.app import app
from verl_padding.errors import PaddingDataError
from verl_padding.runs.charts import OURS, STOCK
from verl_padding.runs.curves import CONFIG, RunCurves, _looks, telling_tails


def test_a_padded_run_is_read_from_its_metrics_and_a_stock_one_by_verls_rule(tmp_path):
    ours = RunCurves.read(write_run(tmp_path / "padded", padded=True))
    stock = RunCurves.read(write_run(tmp_path / "stock", padded=False))
    assert (ours.name, ours.steps, ours.optimizer_steps, ours.pads) == ("padded", [1, 2], [1, 1], [1, 1])
    assert (stock.optimizer_steps, stock.pads, stock.real_rows) == ([1, 2], [1, 4], [5, 8])
    assert ours.reward == stock.reward == [0.25, 0.5]
    assert stock.grad_norm == pytest.approx([0.1, 0.2])


def test_the_command_draws_a_picture_and_tells_the_figures(tmp_path):
    runs = [str(write_run(tmp_path / name, padded=name == "padded")) for name in ("padded", "stock")]
    picture = tmp_path / "runs.png"
    result = CliRunner().invoke(app, ["compare", *runs, "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1 to 2" in result.output


@pytest.mark.parametrize("missing", ["metrics.jsonl", "rollouts"])
def test_a_run_that_left_no_metrics_or_no_dump_is_refused_with_the_settings_that_make_them(tmp_path, missing):
    folder = write_run(tmp_path / "run", padded=True)
    (folder / missing).rename(folder / "elsewhere")
    with pytest.raises(PaddingDataError, match=rf"{missing}: not there, or empty\. Start the run with trainer\.logger"):
        RunCurves.read(folder)


def test_a_stock_run_without_its_config_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", padded=False)
    (folder / CONFIG).unlink()
    with pytest.raises(PaddingDataError, match=r"config\.yaml: not there.*hydra\.run\.dir"):
        RunCurves.read(folder)


def test_a_picture_that_cannot_be_written_is_told(tmp_path):
    run = str(write_run(tmp_path / "run", padded=True))
    for picture in (tmp_path / "no" / "runs.png", tmp_path / "runs.xyz", tmp_path):
        result = CliRunner().invoke(app, ["compare", run, "--picture", str(picture)])
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"--picture {picture}: cannot be written (")
        assert result.stderr.count("\n") == 1


def test_runs_whose_folders_have_one_name_are_told_apart_by_what_is_above(tmp_path):
    runs = [write_run(tmp_path / name / "out", padded=True) for name in ("a", "b")]
    runs.append(write_run(tmp_path / "c", padded=False))
    assert [run.name for run in RunCurves.read_all(runs)] == ["a/out", "b/out", "c"]
    assert telling_tails([Path("/x/out"), Path("/y/x/out")]) == ["/x/out", "y/x/out"]
    with pytest.raises(PaddingDataError, match="named twice"):
        RunCurves.read_all([runs[0], tmp_path / "b" / ".." / "a" / "out"])


def test_no_letter_of_a_long_name_is_cut_off(tmp_path):
    names = [f"{'a_run_with_a_long_name_' * 5}[bold]{number}" for number in range(2)]
    runs = [str(write_run(tmp_path / name, padded=True)) for name in names]
    told = CliRunner().invoke(app, ["compare", *runs, "--picture", str(tmp_path / "a.png")]).stdout
    lines = [line.split("│")[1:-1] for line in told.split("\n") if line.startswith("│")]
    assert "".join(line[0].strip() for line in lines) == "".join(names)
    assert [line[3].strip() for line in lines if line[1].strip()] == ["1", "1"]
    assert "\u2026" not in told


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
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": kept}) + "\n" + second + "\n")
    run = RunCurves.read(folder)
    assert (run.optimizer_steps, run.pads) == ([0, 1], [1, 1])
    assert math.isnan(run.grad_norm[0])
    assert CliRunner().invoke(app, ["compare", str(folder), "--picture", str(tmp_path / "a.png")]).exit_code == 0
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": kept}) + "\n")
    assert CliRunner().invoke(app, ["compare", str(folder), "--picture", str(tmp_path / "a.png")]).exit_code == 0


def test_runs_that_do_not_fit_are_refused_by_name(tmp_path):
    folder = write_run(tmp_path / "run", padded=True)
    for path in [*(folder / "rollouts").iterdir()]:
        path.rename(path.with_name(f"1{path.name}"))
    with pytest.raises(PaddingDataError, match="no step in common"):
        RunCurves.read(folder)
    other = write_run(tmp_path / "other", padded=False)
    for config in ("trainer: 1\n", "- 1\n", "a"):
        (other / CONFIG).write_text(config)
        with pytest.raises(PaddingDataError, match=r"config\.yaml: (not the config of a verl job|cannot be read)"):
            RunCurves.read(other)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("metrics.jsonl", "{\n", "metrics.jsonl, line 1: not what verl's file logger writes"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1: not what verl's file logger writes"),
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read"),
        ("rollouts/2.jsonl", "[]\n", "2.jsonl, line 1: not a row of verl's rollout dump"),
        (
            "rollouts/2.jsonl",
            '{"uid": "a_0_0", "score": 1}\n{"uid": "a_0_1"}\n',
            "2.jsonl, line 2: not a row of verl's",
        ),
        ("rollouts/2.jsonl", "", "2.jsonl: holds no row"),
        ("rollouts/2.jsonl", "\udcff\n", "2.jsonl: cannot be read"),
        (CONFIG, "a: [", "config.yaml: cannot be read"),
        (CONFIG, None, "config.yaml: cannot be read"),
    ],
)
def test_a_file_of_a_run_that_cannot_be_read_is_told_in_one_line(name, text, told, tmp_path):
    folder = write_run(tmp_path / "run", padded=False)
    (folder / name).unlink()
    if text is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_text(text, errors="surrogateescape")
    result = CliRunner().invoke(app, ["compare", str(folder), "--picture", str(tmp_path / "a.png")])
    assert result.exit_code == 1
    assert told in result.stderr
    assert result.stdout == ""


def test_a_file_beside_the_dumps_is_left_alone(tmp_path):
    folder = write_run(tmp_path / "run", padded=True)
    (folder / "rollouts" / "notes.jsonl").write_text("mine")
    assert RunCurves.read(folder).steps == [1, 2]


def test_what_is_no_folder_of_a_run_is_refused(tmp_path):
    (tmp_path / "afile").write_text("mine")
    for run in (tmp_path / "afile", tmp_path / "none", tmp_path / ("long" * 100)):
        result = CliRunner().invoke(app, ["compare", str(run), "--picture", str(tmp_path / "a.png")])
        assert result.exit_code == 1
        assert "metrics.jsonl: not there, or empty" in result.stderr
