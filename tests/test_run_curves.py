"""Runs side by side, from the files they leave."""

import json
import math

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_padding.cli import app
from verl_padding.errors import PaddingDataError
from verl_padding.run_curves import CONFIG, RunCurves

CONFIGURED = {
    "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
    "actor_rollout_ref": {"rollout": {"n": 3}, "actor": {"ppo_mini_batch_size": 2}},
    "algorithm": {"adv_estimator": "grpo"},
    "critic": {"ppo_mini_batch_size": 2},
}


def write_run(folder, *, padded, real_rows=(5, 8)):
    """Two steps; stock verl with mini-batches of 2 x 3 rows dumps its pads."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / CONFIG).parent.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(CONFIGURED), folder / CONFIG)
    lines = []
    for step, real in enumerate(real_rows, start=1):
        data = {"critic/score/mean": 0.5, "actor/grad_norm": 0.1 * step}
        if padded:
            data |= {"padding/actor/optimizer_steps/total": 1.0, "padding/pad_rows/total": 1.0}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
        rows = [{"uid": f"p{row}_0_0", "score": 0.25 * step} for row in range(real)]
        if not padded:
            rows += [{"uid": f"padding_{row}_0_0", "score": 0.0} for row in range(-real % 6)]
        (folder / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


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
    with pytest.raises(PaddingDataError, match="no config of a verl job"):
        RunCurves.read(other)
