"""Runs side by side, from the files they leave."""

import json
import math

import pytest
from typer.testing import CliRunner

from tests.support.run_folder import write_run
from verl_padding.cli.app import app
from verl_padding.errors import PaddingDataError
from verl_padding.runs.curves import CONFIG, RunCurves


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
    result = CliRunner().invoke(app, ["compare", run, "--picture", str(tmp_path / "no" / "runs.png")])
    assert result.exit_code == 1
    assert "cannot be written" in " ".join(result.output.split())


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


def test_runs_that_do_not_fit_are_refused_by_name(tmp_path):
    folder = write_run(tmp_path / "run", padded=True)
    for path in [*(folder / "rollouts").iterdir()]:
        path.rename(path.with_name(f"1{path.name}"))
    with pytest.raises(PaddingDataError, match="no step in common"):
        RunCurves.read(folder)
    other = write_run(tmp_path / "other", padded=False)
    (other / CONFIG).write_text("trainer: 1\n")
    with pytest.raises(PaddingDataError, match="not the config of a verl job"):
        RunCurves.read(other)
